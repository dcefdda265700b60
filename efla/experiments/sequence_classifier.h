// The classifier of the sequential-image study: a sequence of pixels in, ten logits out.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "efla/experiments/arms.h"

namespace efla {

struct ClassifierShape {
  int64_t length = 784;  // pixels
  int64_t width = 64;
  int64_t heads = 1;
  int64_t layers = 1;
  int64_t classes = 10;
};

/// One layer is the model of the paper's released script: pixel -> Linear(1, width) + learned
/// position -> GELU -> one recurrence with k, v, beta from linear maps -> S_T^T q_T -> LayerNorm ->
/// Linear; no scale, no residual, no output projection. More layers are residual blocks of a
/// pre-normed recurrence (per-head RMS norm, output projection) and a GELU MLP, read at the last
/// token.
///
/// Equal seeds give equal first values of all parameters that two arms share.
class SequenceClassifier {
 public:
  SequenceClassifier(const Arm& arm, const ClassifierShape& shape, uint64_t seed,
                     const at::TensorOptions& options);

  /// pixels [B, length] in [0, 1] -> logits [B, classes]. Nothing waits for the device.
  at::Tensor forward(const at::Tensor& pixels) const;

  const std::vector<at::Tensor>& parameters() const { return parameters_; }

 private:
  struct Layer {
    at::Tensor q, k, v;               // [width, width], no bias
    at::Tensor b, b_bias;             // [heads, width], [heads]
    at::Tensor a, dt_bias, a_log;     // forget gate; a_log for Mamba-2 too
    at::Tensor in_scale, in_shift;    // deep model: LayerNorm before the recurrence
    at::Tensor out;                   //   output projection
    at::Tensor mlp_scale, mlp_shift;  //   LayerNorm before the MLP
    at::Tensor expand, expand_bias, contract, contract_bias;
  };
  // k, v, beta and the decay of every token.
  struct Streams {
    at::Tensor k, v;  // [B, T, heads, width / heads]
    at::Tensor beta;  // [B, T, heads]
    std::optional<at::Tensor> log_decay;
  };

  bool deep() const { return shape_.layers > 1; }
  void add_shared(at::Generator& random);
  void add_decays(at::Generator& random);
  at::Tensor add(const at::Tensor& values);
  Streams streams(const Layer& layer, const at::Tensor& h) const;
  at::Tensor read_last(const Layer& layer, const at::Tensor& h) const;
  at::Tensor block(const Layer& layer, const at::Tensor& x) const;

  Arm arm_;
  ClassifierShape shape_;
  at::TensorOptions options_;
  at::Tensor embed_, position_;  // [width, 1], [length, width]
  std::vector<Layer> layers_;
  at::Tensor norm_scale_, norm_shift_, head_, head_bias_;
  std::vector<at::Tensor> parameters_;
};

}  // namespace efla
