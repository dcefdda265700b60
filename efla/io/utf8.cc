#include "efla/io/utf8.h"

#include <algorithm>

#include "efla/io/error.h"

namespace efla {

Utf8Char decode_utf8(std::string_view text) {
  if (text.empty()) return {0, 0, true};
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return {first, 1, false};
  int length = 0;
  char32_t code_point = 0;
  // The second byte's range excludes overlong forms, surrogates and values above U+10FFFF (Unicode
  // standard, table 3-7).
  unsigned char low = 0x80, high = 0xBF;
  if (first >= 0xC2 && first <= 0xDF) {
    length = 2;
    code_point = first & 0x1F;
  } else if (first >= 0xE0 && first <= 0xEF) {
    length = 3;
    code_point = first & 0x0F;
    if (first == 0xE0) low = 0xA0;
    if (first == 0xED) high = 0x9F;
  } else if (first >= 0xF0 && first <= 0xF4) {
    length = 4;
    code_point = first & 0x07;
    if (first == 0xF0) low = 0x90;
    if (first == 0xF4) high = 0x8F;
  } else {
    return {0, 0, false};
  }
  for (int i = 1; i < length; ++i) {
    if (static_cast<size_t>(i) >= text.size()) return {0, 0, true};
    const unsigned char next = byte(static_cast<size_t>(i));
    if (next < low || next > high) return {0, 0, false};
    code_point = (code_point << 6) | (next & 0x3F);
    low = 0x80;
    high = 0xBF;
  }
  return {code_point, length, false};
}

void validate_utf8(std::string_view text, const std::string& origin) {
  size_t i = 0;
  while (i < text.size()) {
    if (static_cast<unsigned char>(text[i]) < 0x80) {
      ++i;
      continue;
    }
    const Utf8Char decoded = decode_utf8(text.substr(i));
    if (decoded.length == 0) {
      const auto line =
          std::count(text.begin(), text.begin() + static_cast<ptrdiff_t>(i), '\n') + 1;
      throw Error(origin + " is not valid UTF-8 at line " + std::to_string(line) +
                  ", byte offset " + std::to_string(i) +
                  ": convert it (for example with iconv) or use the byte tokenizer");
    }
    i += static_cast<size_t>(decoded.length);
  }
}

bool is_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
         c == 0x205F || c == 0x3000;
}

int64_t count_words(std::string_view text) {
  int64_t words = 0;
  bool inside = false;
  for (size_t i = 0; i < text.size();) {
    const Utf8Char decoded = decode_utf8(text.substr(i, 4));
    const bool space = decoded.length > 0 && is_space(decoded.code_point);
    if (!space && !inside) ++words;
    inside = !space;
    i += static_cast<size_t>(std::max(decoded.length, 1));
  }
  return words;
}

}  // namespace efla
