// Timing on a machine that is not ours alone: an operation is measured in turn with a yardstick,
// and rounds in which the yardstick was slow are dropped.
#pragma once

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <vector>

namespace efla::bench {

/// Keeps large tensors in the heap: otherwise every large result pays for fresh pages.
inline void tune_malloc() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  mallopt(M_TOP_PAD, 256 << 20);
}

/// Seconds that one call takes.
inline double seconds(const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

inline double median(std::vector<double> values) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 != 0 ? values[half] : (values[half - 1] + values[half]) / 2;
}

struct Paired {
  double operation = 0;  // seconds, median of the rounds kept
  double yardstick = 0;  // likewise
  double ratio = 0;      // median of yardstick / operation, round by round
  int kept = 0, rounds = 0;
  bool disturbed = false;  // fewer than half of the rounds, or than three, were quiet
};

/// Runs yardstick, operation, yardstick, operation, ..., yardstick. A round is an operation and the
/// mean of its two neighbours; it is kept if both neighbours are within `tolerance` of the fastest
/// yardstick of the run. If fewer than three are, the three with the fastest neighbours are kept
/// and the result is marked as disturbed.
inline Paired measure_paired(const std::function<void()>& operation,
                             const std::function<void()>& yardstick, int rounds,
                             double tolerance = 0.10) {
  operation();  // warm up
  yardstick();
  std::vector<double> yard = {seconds(yardstick)}, times;
  for (int i = 0; i < rounds; ++i) {
    times.push_back(seconds(operation));
    yard.push_back(seconds(yardstick));
  }
  const double best = *std::min_element(yard.begin(), yard.end());
  std::vector<int> order(rounds);
  for (int i = 0; i < rounds; ++i) order[i] = i;
  const auto slower = [&](int i) { return std::max(yard[i], yard[i + 1]); };
  std::sort(order.begin(), order.end(), [&](int a, int b) { return slower(a) < slower(b); });
  Paired out;
  out.rounds = rounds;
  std::vector<double> kept, kept_yard, ratios;
  int quiet = 0;
  for (int i : order) {
    if (slower(i) <= best * (1 + tolerance)) {
      ++quiet;
    } else if (kept.size() >= 3) {
      break;
    }
    const double neighbours = (yard[i] + yard[i + 1]) / 2;
    kept.push_back(times[i]);
    kept_yard.push_back(neighbours);
    ratios.push_back(neighbours / times[i]);
  }
  out.kept = static_cast<int>(kept.size());
  out.disturbed = quiet < 3 || 2 * quiet < rounds;
  out.operation = median(kept);
  out.yardstick = median(kept_yard);
  out.ratio = median(ratios);
  return out;
}

}  // namespace efla::bench
