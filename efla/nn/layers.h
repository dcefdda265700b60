// The layers that hold weights: linear map, embedding, RMS norm, short convolution, SwiGLU MLP.
// Each is an operator of efla/ops or ATen with its parameter under fla's name.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <optional>

namespace efla {

/// `options` with at least float32: for the few numbers that need it whatever the model's dtype
/// (A_log, dt_bias).
at::TensorOptions at_least_float(const at::TensorOptions& options);

/// y = x W^T [+ b]; weight [out, in], bias [out].
class LinearImpl : public torch::nn::Module {
 public:
  LinearImpl(int64_t in, int64_t out, const at::TensorOptions& options, bool with_bias = false);
  at::Tensor forward(const at::Tensor& x) const;
  void initialize(double range);

  at::Tensor weight, bias;  // bias: undefined without one
};
TORCH_MODULE(Linear);

/// Rows of weight [vocab, dim] by id.
class EmbeddingImpl : public torch::nn::Module {
 public:
  EmbeddingImpl(int64_t vocab, int64_t dim, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& ids) const;
  void initialize(double range);

  at::Tensor weight;
};
TORCH_MODULE(Embedding);

/// x * rsqrt(mean(x^2) + eps) * weight [* silu(gate)] over the last dimension; weight [dim]. The
/// result has the weight's dtype, whatever that of x.
class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(int64_t dim, double eps, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& gate = {}) const;
  void initialize();

  at::Tensor weight;

 private:
  double eps_;
};
TORCH_MODULE(RmsNorm);

/// Causal depthwise convolution, optional SiLU; weight [channels, 1, width] as fla stores it, bias
/// [channels].
class ShortConvImpl : public torch::nn::Module {
 public:
  ShortConvImpl(int64_t channels, int64_t width, bool silu, const at::TensorOptions& options,
                bool with_bias = false);

  /// x [B, T, channels]. `tail` (may be null): the last `width` inputs of each sequence,
  /// [B, channels, width]; read if defined, then replaced by those after x.
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& cu_seqlens,
                     at::Tensor* tail) const;
  void initialize(double range);

  at::Tensor weight, bias;  // bias: undefined without one

 private:
  bool silu_;
};
TORCH_MODULE(ShortConv);

/// down(silu(gate(x)) * up(x)).
class SwigluMlpImpl : public torch::nn::Module {
 public:
  SwigluMlpImpl(int64_t dim, int64_t inner, const at::TensorOptions& options);
  at::Tensor forward(const at::Tensor& x) const;
  void initialize(double range);

 private:
  Linear gate_proj_ = nullptr;
  Linear up_proj_ = nullptr;
  Linear down_proj_ = nullptr;
};
TORCH_MODULE(SwigluMlp);

}  // namespace efla
