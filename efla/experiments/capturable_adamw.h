// AdamW with gradient clipping whose step is nothing but work for the device: no number comes back,
// so that a CUDA graph can hold it.
#pragma once

#include <torch/torch.h>

#include <vector>

namespace efla {

class CapturableAdamW {
 public:
  struct Options {
    double learning_rate = 1e-3;
    double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01;  // torch's defaults
    double clip = 1.0;  // largest norm of all gradients together
  };

  /// `parameters` are updated in place.
  CapturableAdamW(std::vector<at::Tensor> parameters, const Options& options);

  /// One update; `gradients`, one per parameter, are clipped in place.
  void step(std::vector<at::Tensor> gradients);

 private:
  std::vector<at::Tensor> parameters_, exp_avg_, exp_avg_sq_;
  at::Tensor count_;                // float32 scalar on the parameters' device
  std::vector<at::Tensor> counts_;  // the same tensor once per parameter
  Options options_;
};

}  // namespace efla
