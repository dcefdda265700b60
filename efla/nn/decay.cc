#include "efla/nn/decay.h"

#include <torch/torch.h>

#include <cmath>

namespace efla {

at::Tensor positive_step(const at::Tensor& z, const at::Tensor& dt_bias) {
  const auto type = z.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::softplus(z.to(type) + dt_bias.to(type));
}

at::Tensor log_decay_of(const at::Tensor& a_log, const at::Tensor& dt) {
  return -(a_log.to(dt.scalar_type()).exp() * dt);
}

void initialize_a_log(at::Tensor& a_log, double low, double high) {
  const torch::NoGradGuard no_grad;
  constexpr double kSmallest = 1e-4;  // U(0, 16) may draw 0, whose logarithm is no weight
  a_log.uniform_(low, high).clamp_min_(kSmallest).log_();
}

void initialize_dt_bias(at::Tensor& dt_bias, double low, double high, double floor) {
  const torch::NoGradGuard no_grad;
  dt_bias.uniform_(std::log(low), std::log(high)).exp_().clamp_min_(floor);
  // The inverse of softplus: dt + log(1 - e^{-dt}).
  dt_bias.add_(at::log(-at::expm1(-dt_bias)));
}

}  // namespace efla
