// The known name closest to a misspelt one, for "did you mean".
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace efla {

/// Insertions, deletions, replacements and swaps of neighbours that turn a into b.
int edit_distance(std::string_view a, std::string_view b);

/// The candidate nearest to `name`, comparing dotted names also by their last part ("steps" finds
/// "train.steps"). `candidates` must not be empty; the first of equals wins.
std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace efla
