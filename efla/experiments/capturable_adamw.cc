#include "efla/experiments/capturable_adamw.h"

namespace efla {

CapturableAdamW::CapturableAdamW(std::vector<at::Tensor> parameters, const Options& options)
    : parameters_(std::move(parameters)), options_(options) {
  const torch::NoGradGuard no_grad;
  for (const at::Tensor& parameter : parameters_) {
    exp_avg_.push_back(at::zeros_like(parameter));
    exp_avg_sq_.push_back(at::zeros_like(parameter));
  }
  count_ = at::zeros({}, parameters_.at(0).options().dtype(at::kFloat));
  counts_.assign(parameters_.size(), count_);
}

void CapturableAdamW::step(std::vector<at::Tensor> gradients) {
  const torch::NoGradGuard no_grad;
  // The fused kernels want the strides of the parameters.
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].strides() == parameters_[i].strides()) continue;
    gradients[i] = at::empty_like(parameters_[i]).copy_(gradients[i]);
  }
  // As torch's clip_grad_norm_.
  const at::Tensor norm = at::stack(at::_foreach_norm(gradients)).norm();
  at::_foreach_mul_(gradients, at::clamp_max(options_.clip / (norm + 1e-6), 1.0));
  count_.add_(1);  // the fused kernel reads it for the bias correction
  at::_fused_adamw_(parameters_, gradients, exp_avg_, exp_avg_sq_, /*max_exp_avg_sqs=*/{}, counts_,
                    options_.learning_rate, options_.beta1, options_.beta2, options_.weight_decay,
                    options_.eps, /*amsgrad=*/false, /*maximize=*/false);
}

}  // namespace efla
