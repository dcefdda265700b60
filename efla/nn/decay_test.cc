#include "efla/nn/decay.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

namespace efla {
namespace {

TEST(Decay, LogDecayByHand) {
  const at::Tensor z = at::tensor({0.5, -2.0}, at::kDouble).view({1, 1, 2});
  const at::Tensor dt = positive_step(z, at::tensor({0.25, 1.0}, at::kDouble));
  EXPECT_NEAR(dt[0][0][0].item<double>(), std::log1p(std::exp(0.75)), 1e-15);
  EXPECT_NEAR(dt[0][0][1].item<double>(), std::log1p(std::exp(-1.0)), 1e-15);
  const at::Tensor g = log_decay_of(at::tensor({std::log(3.0), 0.0}, at::kDouble), dt);
  EXPECT_NEAR(g[0][0][0].item<double>(), -3 * std::log1p(std::exp(0.75)), 1e-14);
  EXPECT_NEAR(g[0][0][1].item<double>(), -std::log1p(std::exp(-1.0)), 1e-15);
}

TEST(Decay, IsComputedInFloat32AtLeast) {
  const at::Tensor z = at::zeros({1, 3, 2}, at::kBFloat16), bias = at::zeros({2}, at::kFloat);
  const at::Tensor dt = positive_step(z, bias);
  EXPECT_EQ(dt.scalar_type(), at::kFloat);
  EXPECT_EQ(log_decay_of(bias, dt).scalar_type(), at::kFloat);
}

// With steps this large nothing but the exact inverse of softplus gives them back.
TEST(Decay, FirstStepsFillTheirIntervalEvenlyInTheLogarithm) {
  torch::manual_seed(4);
  at::Tensor bias = at::empty({20000}, at::kDouble);
  initialize_dt_bias(bias, 0.5, 8.0, 1e-4);
  const at::Tensor dt = at::softplus(bias);
  EXPECT_NEAR(dt.min().item<double>(), 0.5, 1e-2);
  EXPECT_NEAR(dt.max().item<double>(), 8.0, 1e-2);
  EXPECT_GE(dt.min().item<double>(), 0.5 - 1e-12);
  EXPECT_LE(dt.max().item<double>(), 8.0 + 1e-12);
  EXPECT_NEAR(dt.log().mean().item<double>(), std::log(2.0), 0.03);  // five standard errors
  initialize_dt_bias(bias, 0.5, 8.0, 2.0);
  EXPECT_NEAR(at::softplus(bias).min().item<double>(), 2.0, 1e-12);
}

TEST(Decay, FirstRatesFillTheirInterval) {
  torch::manual_seed(4);
  at::Tensor a_log = at::empty({20000}, at::kDouble);
  initialize_a_log(a_log, 0, 16);
  EXPECT_TRUE(a_log.isfinite().all().item<bool>());
  EXPECT_NEAR(a_log.exp().mean().item<double>(), 8, 5 * 16 / std::sqrt(12.0 * 20000));
  EXPECT_LE(a_log.exp().max().item<double>(), 16);
}

}  // namespace
}  // namespace efla
