#include "efla/train/optimizer.h"

#include <fmt/format.h>

#include "efla/io/error.h"

namespace efla {

bool takes_weight_decay(const std::string& name, const at::Tensor& parameter) {
  // Biases, norm weights, A_log and dt_bias are all vectors; the name is asked too so that a norm
  // of another shape stays exempt.
  return parameter.dim() >= 2 && name.find("norm") == std::string::npos;
}

AdamW::AdamW(NamedTensors parameters, const OptimizerRecipe& recipe)
    : parameters_(std::move(parameters)), recipe_(recipe) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [name, parameter] = parameters_[i];
    exp_avg_.push_back(at::zeros_like(parameter.detach()));
    exp_avg_sq_.push_back(at::zeros_like(parameter.detach()));
    steps_.push_back(at::zeros({}, at::kFloat));
    group_of(name, parameter).members.push_back(i);
  }
}

// A model in bfloat16 keeps A_log and dt_bias in float32; the fused kernel takes one type a call.
AdamW::Group& AdamW::group_of(const std::string& name, const at::Tensor& parameter) {
  const double decay = takes_weight_decay(name, parameter) ? recipe_.weight_decay : 0;
  for (Group& group : groups_) {
    if (group.weight_decay == decay && group.dtype == parameter.scalar_type()) return group;
  }
  return groups_.emplace_back(Group{decay, parameter.scalar_type(), {}});
}

void AdamW::step(double learning_rate) {
  const torch::NoGradGuard no_grad;
  for (const Group& group : groups_) {
    std::vector<at::Tensor> parameters, gradients, exp_avg, exp_avg_sq, steps;
    for (const size_t i : group.members) {
      const at::Tensor& parameter = parameters_[i].second;
      if (!parameter.grad().defined()) continue;
      parameters.push_back(parameter);
      gradients.push_back(parameter.grad());
      exp_avg.push_back(exp_avg_[i]);
      exp_avg_sq.push_back(exp_avg_sq_[i]);
      steps.push_back(steps_[i]);
    }
    if (parameters.empty()) continue;
    at::_foreach_add_(steps, 1);  // the fused kernel reads the count for its bias correction
    at::_fused_adamw_(parameters, gradients, exp_avg, exp_avg_sq, /*max_exp_avg_sqs=*/{}, steps,
                      learning_rate, recipe_.beta1, recipe_.beta2, group.weight_decay, recipe_.eps,
                      /*amsgrad=*/false, /*maximize=*/false);
  }
}

void AdamW::zero_grad() {
  for (const auto& [name, parameter] : parameters_) parameter.mutable_grad().reset();
}

NamedTensors AdamW::state() const {
  NamedTensors state;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const std::string& name = parameters_[i].first;
    state.emplace_back("exp_avg." + name, exp_avg_[i]);
    state.emplace_back("exp_avg_sq." + name, exp_avg_sq_[i]);
    state.emplace_back("step." + name, steps_[i]);
  }
  return state;
}

void AdamW::load_state(const std::map<std::string, at::Tensor>& saved) {
  const NamedTensors own = state();
  if (saved.size() != own.size()) {
    throw Error(fmt::format("optimizer state has {} tensors where this model needs {}",
                            saved.size(), own.size()));
  }
  for (const auto& [name, tensor] : own) {
    const auto found = saved.find(name);
    if (found == saved.end()) throw Error(fmt::format("optimizer state lacks '{}'", name));
    if (found->second.sizes() != tensor.sizes() || found->second.dtype() != tensor.dtype()) {
      throw Error(
          fmt::format("optimizer state '{}' has another shape or type than the model", name));
    }
  }
  for (const auto& [name, tensor] : own) tensor.copy_(saved.at(name));
}

}  // namespace efla
