// AdamW with decoupled weight decay over the parameters of one model.
#pragma once

#include <torch/torch.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "efla/train/recipe.h"

namespace efla {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Whether weight decay applies: to matrices and kernels, not to norms, biases and vectors.
bool takes_weight_decay(const std::string& name, const at::Tensor& parameter);

class AdamW {
 public:
  /// `parameters` are updated in place; their names label the saved state.
  AdamW(NamedTensors parameters, const OptimizerRecipe& recipe);

  /// One update from the parameters' .grad. A parameter without a gradient keeps its value.
  void step(double learning_rate);

  void zero_grad();

  /// exp_avg.NAME, exp_avg_sq.NAME (the parameter's shape and type) and step.NAME (float32 scalar),
  /// sharing memory with the optimizer.
  NamedTensors state() const;

  /// Puts back what state() gave. Throws Error where a tensor is missing, unknown or of another
  /// shape.
  void load_state(const std::map<std::string, at::Tensor>& state);

  const NamedTensors& parameters() const { return parameters_; }

 private:
  // Parameters that one call of the fused kernel updates.
  struct Group {
    double weight_decay = 0;
    at::ScalarType dtype = at::kFloat;
    std::vector<size_t> members;  // indices into parameters_
  };

  Group& group_of(const std::string& name, const at::Tensor& parameter);

  NamedTensors parameters_;
  OptimizerRecipe recipe_;
  std::vector<at::Tensor> exp_avg_, exp_avg_sq_, steps_;  // one each per parameter
  std::vector<Group> groups_;
};

}  // namespace efla
