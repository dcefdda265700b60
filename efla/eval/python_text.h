// String operations with Python's meaning, for texts that lm-evaluation-harness prepares in Python:
// white space and letters are Unicode's, lengths count characters. Texts are valid UTF-8.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace efla {

/// str.rstrip(), str.lstrip(), str.strip() as views into `text`.
std::string_view strip_right(std::string_view text);
std::string_view strip_left(std::string_view text);
std::string_view strip(std::string_view text);

/// len(str): characters (code points), not bytes.
int64_t count_characters(std::string_view text);

/// str.capitalize(): the first character upper case, the others lower case. One character becomes
/// one character (so not "ß" to "Ss").
std::string capitalize(std::string_view text);

/// s[:1].lower() + s[1:].
std::string lower_first(std::string_view text);

/// str.replace(from, to): left to right, what was replaced is not looked at again.
std::string replace_all(std::string_view text, std::string_view from, std::string_view to);

}  // namespace efla
