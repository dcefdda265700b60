#include "efla/ops/executor.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

namespace efla::ops {
namespace {

// Workers take indices from a shared counter: tasks differ in cost (packed sequences), and which
// worker runs a task never changes its result.
void run(int64_t count, const std::function<void(int64_t)>& body) {
  const int64_t workers = std::min<int64_t>(count, at::get_num_threads());
  if (workers <= 1 || at::in_parallel_region()) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < count;
         i = next.fetch_add(1, std::memory_order_relaxed)) {
      body(i);
    }
  });
}

}  // namespace

Executor torch_executor() {
  Executor executor;
  executor.threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  executor.parallel_for = run;
  return executor;
}

}  // namespace efla::ops
