#include "efla/cli/suggest.h"

#include <algorithm>
#include <numeric>

namespace efla::cli {
namespace {

// Levenshtein distance with two rows, plus transposition of neighbours at no extra memory is not
// needed: a swapped pair costs two, which is still close enough to be suggested.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row.back();
}

}  // namespace

std::string nearest_word(std::string_view typed, const std::vector<std::string>& known) {
  std::string best;
  size_t best_distance = std::max<size_t>(1, typed.size() / 2) + 1;
  for (const std::string& word : known) {
    const size_t distance = edit_distance(typed, word);
    if (distance < best_distance) {
      best_distance = distance;
      best = word;
    }
  }
  return best;
}

}  // namespace efla::cli
