// UTF-8: validation with a position, cutting at character boundaries, counting words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace efla {

/// One decoded character. length is 0 when the bytes at hand are not valid UTF-8 (overlong forms,
/// surrogates and values above U+10FFFF included).
struct Utf8Char {
  char32_t code_point;
  int length;
  /// Invalid so far only because the text ends here: more bytes could complete it.
  bool incomplete;
};

/// Decodes the character at the start of `text`.
Utf8Char decode_utf8(std::string_view text);

/// Throws an efla::Error with `origin` (a path or "the prompt"), the line and the byte offset of
/// the first byte that is not valid UTF-8.
void validate_utf8(std::string_view text, const std::string& origin);

/// White space as Python's str.isspace() has it, by which its strip(), split() and \s go.
bool is_space(char32_t code_point);

/// The number of words separated by white space (what Python's str.split() counts), for perplexity
/// per word. The text is valid UTF-8; other bytes count as letters.
int64_t count_words(std::string_view text);

}  // namespace efla
