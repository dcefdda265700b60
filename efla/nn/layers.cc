#include "efla/nn/layers.h"

#include <tuple>

#include "efla/ops/ops.h"

namespace efla {

namespace {

void normal_(at::Tensor& weight, double range) {
  const torch::NoGradGuard no_grad;
  weight.normal_(0.0, range);
}

void constant_(at::Tensor& weight, double value) {
  const torch::NoGradGuard no_grad;
  weight.fill_(value);
}

}  // namespace

at::TensorOptions at_least_float(const at::TensorOptions& options) {
  const auto type = c10::typeMetaToScalarType(options.dtype());
  return type == at::kBFloat16 || type == at::kHalf ? options.dtype(at::kFloat) : options;
}

LinearImpl::LinearImpl(int64_t in, int64_t out, const at::TensorOptions& options, bool with_bias)
    : weight(register_parameter("weight", at::empty({out, in}, options))) {
  if (with_bias) bias = register_parameter("bias", at::empty({out}, options));
}

at::Tensor LinearImpl::forward(const at::Tensor& x) const {
  return bias.defined() ? at::linear(x, weight, bias) : at::linear(x, weight);
}

void LinearImpl::initialize(double range) {
  normal_(weight, range);
  if (bias.defined()) constant_(bias, 0);
}

EmbeddingImpl::EmbeddingImpl(int64_t vocab, int64_t dim, const at::TensorOptions& options)
    : weight(register_parameter("weight", at::empty({vocab, dim}, options))) {}

at::Tensor EmbeddingImpl::forward(const at::Tensor& ids) const {
  return at::embedding(weight, ids);
}

void EmbeddingImpl::initialize(double range) { normal_(weight, range); }

RmsNormImpl::RmsNormImpl(int64_t dim, double eps, const at::TensorOptions& options)
    : weight(register_parameter("weight", at::empty({dim}, options))), eps_(eps) {}

at::Tensor RmsNormImpl::forward(const at::Tensor& x, const std::optional<at::Tensor>& gate) const {
  if (x.scalar_type() == weight.scalar_type()) return ops::rms_norm(x, weight, eps_, gate);
  // A float32 residual stream in a bfloat16 model.
  std::optional<at::Tensor> wide_gate;
  if (gate) wide_gate = gate->to(x.scalar_type());
  return ops::rms_norm(x, weight.to(x.scalar_type()), eps_, wide_gate).to(weight.scalar_type());
}

void RmsNormImpl::initialize() { constant_(weight, 1); }

ShortConvImpl::ShortConvImpl(int64_t channels, int64_t width, bool silu,
                             const at::TensorOptions& options, bool with_bias)
    : weight(register_parameter("weight", at::empty({channels, 1, width}, options))), silu_(silu) {
  if (with_bias) bias = register_parameter("bias", at::empty({channels}, options));
}

at::Tensor ShortConvImpl::forward(const at::Tensor& x, const std::optional<at::Tensor>& cu_seqlens,
                                  at::Tensor* tail) const {
  std::optional<at::Tensor> initial;
  if (tail && tail->defined()) initial = *tail;
  std::optional<at::Tensor> offset;
  if (bias.defined()) offset = bias;
  auto [y, final_tail] =
      ops::short_conv(x, weight.squeeze(1), silu_, initial, tail != nullptr, cu_seqlens, offset);
  if (tail) *tail = final_tail.detach();
  return y;
}

void ShortConvImpl::initialize(double range) {
  normal_(weight, range);
  if (bias.defined()) constant_(bias, 0);
}

SwigluMlpImpl::SwigluMlpImpl(int64_t dim, int64_t inner, const at::TensorOptions& options)
    : gate_proj_(register_module("gate_proj", Linear(dim, inner, options))),
      up_proj_(register_module("up_proj", Linear(dim, inner, options))),
      down_proj_(register_module("down_proj", Linear(inner, dim, options))) {}

at::Tensor SwigluMlpImpl::forward(const at::Tensor& x) const {
  return down_proj_->forward(ops::swiglu(gate_proj_->forward(x), up_proj_->forward(x)));
}

void SwigluMlpImpl::initialize(double range) {
  gate_proj_->initialize(range);
  up_proj_->initialize(range);
  down_proj_->initialize(range);
}

}  // namespace efla
