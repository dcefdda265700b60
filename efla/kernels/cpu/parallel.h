// How the kernels split work: contiguous ranges, one per thread, none too small to be worth one.
#pragma once

#include <algorithm>
#include <cstdint>

#include "efla/kernels/params.h"

namespace efla::cpu {

/// Calls body(begin, end) on contiguous ranges that cover [0, count): at most executor.threads of
/// them and each, as far as count allows, of `grain` units or more.
template <typename Body>
void parallel_ranges(const Executor& executor, int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
  const int64_t tasks =
      std::clamp<int64_t>(count / std::max<int64_t>(grain, 1), 1, std::max(executor.threads, 1));
  if (tasks == 1) {
    body(int64_t{0}, count);
    return;
  }
  executor.parallel_for(tasks,
                        [&](int64_t i) { body(count * i / tasks, count * (i + 1) / tasks); });
}

}  // namespace efla::cpu
