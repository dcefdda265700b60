#include "efla/ops/executor.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

namespace efla::ops {
namespace {

// Worker w starts with index w and then takes indices from a shared counter: tasks differ in cost
// (packed sequences), yet a call with as many tasks as workers finds its data in the cache of the
// core that had it in the last call. Which worker runs a task never changes its result.
void run(int64_t count, const std::function<void(int64_t)>& body) {
  const int64_t workers = std::min<int64_t>(count, at::get_num_threads());
  if (workers <= 1 || at::in_parallel_region()) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  std::atomic<int64_t> next{workers};
  at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t i = worker; i < count; i = next.fetch_add(1, std::memory_order_relaxed)) body(i);
    }
  });
}

}  // namespace

Executor torch_executor() { return {at::in_parallel_region() ? 1 : at::get_num_threads(), run}; }

}  // namespace efla::ops
