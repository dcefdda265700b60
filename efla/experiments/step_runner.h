// How the steps of one training run are taken.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace efla {

/// Belongs to the thread that made it. On a CPU it calls step after step. On a GPU it owns a
/// stream, current for this thread as long as the runner lives, on which a few steps are taken
/// plainly and one is then captured as a CUDA graph that stands for all others.
class StepRunner {
 public:
  virtual ~StepRunner() = default;

  /// Takes `count` steps. `step` must do the same work every time, from and to the same tensors,
  /// without waiting for the device. Calls go_on(steps taken) now and then and returns early when
  /// it is false; the steps are finished on return.
  virtual void run(const std::function<void()>& step, int64_t count,
                   const std::function<bool(int64_t)>& go_on) = 0;
};

/// `graphs` false: plain steps on the stream. Throws Error for a device that this build or machine
/// does not have.
std::unique_ptr<StepRunner> make_step_runner(at::Device device, bool graphs);

/// Whether this build has its CUDA part and the machine a CUDA device.
bool cuda_usable();

/// Waits until the device has done what it was given (nothing to do on a CPU).
void wait_for(at::Device device);

}  // namespace efla
