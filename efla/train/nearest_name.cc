#include "efla/train/nearest_name.h"

#include <algorithm>
#include <limits>
#include <utility>

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
  std::pair<int, int> best_distance(std::numeric_limits<int>::max(), 0);
  for (const std::string& candidate : candidates) {
    const int whole = edit_distance(name, candidate);
    const int last = edit_distance(leaf(name), leaf(candidate));
    // Where last parts match equally well, the whole name decides.
    if (const std::pair distance(std::min(whole, last), whole); distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

}  // namespace efla
