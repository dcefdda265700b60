#include "efla/train/nearest_name.h"

#include <algorithm>
#include <limits>

namespace efla {

int edit_distance(std::string_view a, std::string_view b) {
  const size_t columns = b.size() + 1;
  std::vector<int> two_back(columns), previous(columns), row(columns);
  for (size_t j = 0; j < columns; ++j) row[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    two_back.swap(previous);
    previous.swap(row);
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j < columns; ++j) {
      row[j] =
          std::min({previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], two_back[j - 2] + 1);
      }
    }
  }
  return row.back();
}

std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates) {
  const auto leaf = [](std::string_view dotted) { return dotted.substr(dotted.rfind('.') + 1); };
  std::string best;
  int best_distance = std::numeric_limits<int>::max();
  for (const std::string& candidate : candidates) {
    // Doubled so that a match of the whole name beats an equal match of the last part.
    const int whole = 2 * edit_distance(name, candidate);
    const int last = 2 * edit_distance(leaf(name), leaf(candidate)) + 1;
    if (const int distance = std::min(whole, last); distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

}  // namespace efla
