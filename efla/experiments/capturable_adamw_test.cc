#include "efla/experiments/capturable_adamw.h"

#include <gtest/gtest.h>

namespace efla {
namespace {

// torch's own AdamW and clip_grad_norm_ beside ours, with gradients that are clipped and others
// that are not.
TEST(CapturableAdamW, IsTorchsAdamWWithItsClipping) {
  torch::manual_seed(1);
  std::vector<at::Tensor> ours, theirs;
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{3, 4}, {5}, {}}) {
    ours.push_back(torch::randn(sizes));
    theirs.push_back(ours.back().clone().requires_grad_(true));
  }
  CapturableAdamW::Options options;
  options.learning_rate = 0.02;
  CapturableAdamW adamw(ours, options);
  torch::optim::AdamW reference(theirs, torch::optim::AdamWOptions(0.02));
  for (const double size : {10.0, 0.01, 1.0, 0.1}) {
    std::vector<at::Tensor> gradients;
    for (at::Tensor& parameter : theirs) {
      gradients.push_back(size * torch::randn_like(parameter));
      parameter.mutable_grad() = gradients.back().clone();
    }
    gradients[0] = gradients[0].t().contiguous().t();  // as a product may leave it
    torch::nn::utils::clip_grad_norm_(theirs, 1.0);
    reference.step();
    adamw.step(gradients);
    for (size_t i = 0; i < ours.size(); ++i) {
      EXPECT_TRUE(torch::allclose(ours[i], theirs[i], 1e-5, 1e-7)) << ours[i] << theirs[i];
    }
  }
}

}  // namespace
}  // namespace efla
