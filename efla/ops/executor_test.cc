// The executor runs every index once, obeys at::set_num_threads, nests, and passes exceptions on.
#include "efla/ops/executor.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

namespace efla::ops {
namespace {

class TorchExecutor : public testing::Test {
 protected:
  ~TorchExecutor() override { at::set_num_threads(before_); }
  const int before_ = at::get_num_threads();
};

TEST_F(TorchExecutor, RunsEveryIndexOnce) {
  for (const int threads : {1, 2, 5}) {
    at::set_num_threads(threads);
    const Executor executor = torch_executor();
    EXPECT_EQ(executor.threads, threads);
    for (const int64_t count : {0, 1, 2, 3, 100, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(count));
      executor.parallel_for(count, [&](int64_t i) { ++runs[static_cast<size_t>(i)]; });
      for (const auto& r : runs) EXPECT_EQ(r, 1);
    }
  }
}

TEST_F(TorchExecutor, UsesAsManyThreadsAsTorchSays) {
  // Two tasks that wait for each other end only if two threads run them.
  at::set_num_threads(2);
  std::mutex mutex;
  std::condition_variable arrived;
  int waiting = 0;
  bool met = true;
  torch_executor().parallel_for(2, [&](int64_t) {
    std::unique_lock lock(mutex);
    ++waiting;
    arrived.notify_all();
    met &= arrived.wait_for(lock, std::chrono::seconds(60), [&] { return waiting == 2; });
  });
  EXPECT_TRUE(met);

  at::set_num_threads(1);
  std::set<std::thread::id> ids;
  torch_executor().parallel_for(50, [&](int64_t) { ids.insert(std::this_thread::get_id()); });
  EXPECT_EQ(ids.size(), 1u);
}

TEST_F(TorchExecutor, IsSerialInsideAParallelRegion) {
  at::set_num_threads(2);
  std::atomic<int> total{0};
  torch_executor().parallel_for(4, [&](int64_t) {
    const Executor inner = torch_executor();
    EXPECT_EQ(inner.threads, 1);
    const auto me = std::this_thread::get_id();
    inner.parallel_for(10, [&](int64_t) {
      EXPECT_EQ(std::this_thread::get_id(), me);
      ++total;
    });
  });
  EXPECT_EQ(total, 40);
}

TEST_F(TorchExecutor, PassesExceptionsOn) {
  for (const int threads : {1, 2}) {
    at::set_num_threads(threads);
    EXPECT_THROW(torch_executor().parallel_for(8,
                                               [](int64_t i) {
                                                 if (i == 5) throw std::runtime_error("five");
                                               }),
                 std::runtime_error);
  }
}

}  // namespace
}  // namespace efla::ops
