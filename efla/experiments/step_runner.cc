#include "efla/experiments/step_runner.h"

#include <torch/torch.h>

#include <algorithm>

#include "efla/io/error.h"

#ifdef EFLA_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <mutex>
#endif

namespace efla {
namespace {

class PlainRunner : public StepRunner {
 public:
  void run(const std::function<void()>& step, int64_t count,
           const std::function<bool(int64_t)>& go_on) override {
    for (int64_t done = 1; done <= count; ++done) {
      step();
      if (!go_on(done)) return;
    }
  }
};

#ifdef EFLA_CUDA

// A report waits for the device; the others are queued behind each other.
constexpr int64_t kStepsBetweenReports = 16;

// Steps before the capture: libraries make their handles and workspaces in them.
constexpr int64_t kWarmUpSteps = 3;

// One thread at a time warms up, captures and lets go of graphs: torch keeps a list of the graphs
// of its generator without a lock, and autograd runs all backward passes of a device in one thread.
// The captures are of the mode that forbids unsafe calls to their own thread alone, because other
// threads allocate meanwhile.
std::mutex& capture_mutex() {
  static std::mutex mutex;
  return mutex;
}

class CudaRunner : public StepRunner {
 public:
  CudaRunner(at::Device device, bool graphs)
      : guard_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())),
        pool_(at::cuda::graph_pool_handle()),
        graphs_(graphs) {}

  ~CudaRunner() override {
    const std::lock_guard<std::mutex> lock(capture_mutex());
    try {
      guard_.current_stream().synchronize();
    } catch (const c10::Error&) {  // a broken device has been reported by whoever used it
    }
    graph_.reset();
  }
  CudaRunner(const CudaRunner&) = delete;
  CudaRunner& operator=(const CudaRunner&) = delete;

  void run(const std::function<void()>& step, int64_t count,
           const std::function<bool(int64_t)>& go_on) override {
    const int64_t plain = graphs_ ? std::min(count, kWarmUpSteps) : count;
    int64_t done = 0;
    {
      std::unique_lock<std::mutex> lock(capture_mutex(), std::defer_lock);
      if (graphs_) lock.lock();
      if (!take(step, plain, done, go_on)) return;
      if (done < count) capture(step);
    }
    take([this] { graph_->replay(); }, count - done, done, go_on);
  }

 private:
  c10::cuda::CUDAStream stream() const { return guard_.current_stream(); }

  // `count` more steps; false where go_on ended them.
  bool take(const std::function<void()>& step, int64_t count, int64_t& done,
            const std::function<bool(int64_t)>& go_on) {
    for (int64_t i = 1; i <= count; ++i) {
      step();
      ++done;
      if (i % kStepsBetweenReports != 0 && i != count) continue;
      stream().synchronize();
      if (!go_on(done)) return false;
    }
    return true;
  }

  void capture(const std::function<void()>& step) {
    stream().synchronize();
    auto graph = std::make_unique<at::cuda::CUDAGraph>();
    graph->capture_begin(pool_, cudaStreamCaptureModeThreadLocal);
    try {
      step();
    } catch (...) {
      try {
        graph->capture_end();  // the stream must not stay in the capture
      } catch (const c10::Error&) {
      }
      throw;
    }
    graph->capture_end();
    // The graph of the run before kept the pool and so its memory for this one. It is never
    // replayed again.
    graph_ = std::move(graph);
  }

  c10::cuda::CUDAStreamGuard guard_;
  at::cuda::MempoolId_t pool_;
  bool graphs_;
  std::unique_ptr<at::cuda::CUDAGraph> graph_;
};

#endif

}  // namespace

#ifdef EFLA_CUDA

bool cuda_usable() { return torch::cuda::is_available(); }

void wait_for(at::Device device) {
  if (device.is_cuda()) torch::cuda::synchronize(device.index());
}

std::unique_ptr<StepRunner> make_step_runner(at::Device device, bool graphs) {
  if (!device.is_cuda()) return std::make_unique<PlainRunner>();
  if (!cuda_usable()) throw Error("--device cuda: no CUDA device here; use --device cpu");
  return std::make_unique<CudaRunner>(device, graphs);
}

#else

bool cuda_usable() { return false; }

void wait_for(at::Device /*device*/) {}

std::unique_ptr<StepRunner> make_step_runner(at::Device device, bool /*graphs*/) {
  if (device.is_cuda()) {
    throw Error("--device cuda: this build has no CUDA part; build with scripts/build.sh cuda");
  }
  return std::make_unique<PlainRunner>();
}

#endif

}  // namespace efla
