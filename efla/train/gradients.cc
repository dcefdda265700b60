#include "efla/train/gradients.h"

#include <cmath>

namespace efla {
namespace {

bool all_finite(const at::Tensor& tensor) { return at::isfinite(tensor).all().item<bool>(); }

}  // namespace

double clip_gradients(const NamedTensors& parameters, double max_norm) {
  std::vector<at::Tensor> gradients;
  for (const auto& [name, parameter] : parameters) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  if (gradients.empty()) return 0;
  const double norm = at::stack(at::_foreach_norm(gradients)).to(at::kDouble).norm().item<double>();
  if (max_norm > 0 && std::isfinite(norm) && norm > max_norm) {
    at::_foreach_mul_(gradients, max_norm / norm);
  }
  return norm;
}

std::optional<std::string> first_non_finite(const NamedTensors& parameters) {
  for (const auto& [name, parameter] : parameters) {
    if (!all_finite(parameter.detach())) return "weight " + name;
  }
  // Backward runs from the output to the input: the last parameter got its gradient first.
  for (auto it = parameters.rbegin(); it != parameters.rend(); ++it) {
    const at::Tensor gradient = it->second.grad();
    if (gradient.defined() && !all_finite(gradient)) return "gradient of " + it->first;
  }
  return std::nullopt;
}

}  // namespace efla
