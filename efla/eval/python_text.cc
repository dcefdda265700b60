#include "efla/eval/python_text.h"

#include <locale.h>
#include <wctype.h>

#include <algorithm>

#include "efla/io/utf8.h"

namespace efla {
namespace {

// Bytes of the character at the start; of bytes that are no UTF-8, one.
size_t length_at(std::string_view text) {
  return static_cast<size_t>(std::max(1, decode_utf8(text.substr(0, 4)).length));
}

bool space_at(std::string_view text) {
  const Utf8Char character = decode_utf8(text.substr(0, 4));
  return character.length > 0 && is_space(character.code_point);
}

void append_utf8(std::string& text, char32_t c) {
  const auto continuation = [&](int shift) {
    text += static_cast<char>(0x80 | ((c >> shift) & 0x3F));
  };
  if (c < 0x80) {
    text += static_cast<char>(c);
  } else if (c < 0x800) {
    text += static_cast<char>(0xC0 | (c >> 6));
    continuation(0);
  } else if (c < 0x10000) {
    text += static_cast<char>(0xE0 | (c >> 12));
    continuation(6);
    continuation(0);
  } else {
    text += static_cast<char>(0xF0 | (c >> 18));
    continuation(12);
    continuation(6);
    continuation(0);
  }
}

// Unicode's simple case mappings, whatever the user's locale; ASCII alone if the C library has no
// C.UTF-8.
locale_t unicode_locale() {
  static const locale_t locale = newlocale(LC_CTYPE_MASK, "C.UTF-8", nullptr);
  return locale;
}

char32_t lower(char32_t c) {
  if (c < 0x80) return c >= 'A' && c <= 'Z' ? c + 32 : c;
  if (unicode_locale() == nullptr) return c;
  return static_cast<char32_t>(towlower_l(static_cast<wint_t>(c), unicode_locale()));
}

char32_t upper(char32_t c) {
  if (c < 0x80) return c >= 'a' && c <= 'z' ? c - 32 : c;
  if (unicode_locale() == nullptr) return c;
  return static_cast<char32_t>(towupper_l(static_cast<wint_t>(c), unicode_locale()));
}

template <typename Map>
std::string map_characters(std::string_view text, const Map& map) {
  std::string result;
  result.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const Utf8Char character = decode_utf8(text.substr(i, 4));
    if (character.length == 0) {
      result += text[i++];
      continue;
    }
    append_utf8(result, map(character.code_point, i == 0));
    i += static_cast<size_t>(character.length);
  }
  return result;
}

}  // namespace

std::string_view strip_right(std::string_view text) {
  while (!text.empty()) {
    size_t last = text.size() - 1;
    while (last > 0 && (static_cast<unsigned char>(text[last]) & 0xC0) == 0x80) --last;
    if (!space_at(text.substr(last))) break;
    text = text.substr(0, last);
  }
  return text;
}

std::string_view strip_left(std::string_view text) {
  while (!text.empty() && space_at(text)) text.remove_prefix(length_at(text));
  return text;
}

std::string_view strip(std::string_view text) { return strip_left(strip_right(text)); }

int64_t count_characters(std::string_view text) {
  int64_t count = 0;
  for (; !text.empty(); text.remove_prefix(length_at(text))) ++count;
  return count;
}

std::string capitalize(std::string_view text) {
  return map_characters(text, [](char32_t c, bool first) { return first ? upper(c) : lower(c); });
}

std::string lower_first(std::string_view text) {
  return map_characters(text, [](char32_t c, bool first) { return first ? lower(c) : c; });
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string result;
  for (size_t found; (found = text.find(from)) != std::string_view::npos;) {
    result.append(text.substr(0, found)).append(to);
    text.remove_prefix(found + from.size());
  }
  return result.append(text);
}

}  // namespace efla
