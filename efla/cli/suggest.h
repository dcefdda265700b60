// "Did you mean ...?": the known word that is closest to what was typed.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace efla::cli {

/// The word of `known` with the smallest edit distance to `typed`, or "" when none is close enough
/// to be worth suggesting (more than half of the typed letters would have to change).
std::string nearest_word(std::string_view typed, const std::vector<std::string>& known);

}  // namespace efla::cli
