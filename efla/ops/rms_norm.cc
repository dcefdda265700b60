// efla::rms_norm: RMS norm over the last dimension with an optional weight and SiLU gate.
#include <torch/library.h>
#include <torch/torch.h>

#include <array>
#include <tuple>

#include "efla/kernels/cpu/layer_ops.h"
#include "efla/ops/cuda_layer_kernels.h"
#include "efla/ops/executor.h"
#include "efla/ops/tensors.h"

namespace efla::ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;
using Wanted = std::array<bool, 3>;  // gradients of x, weight, gate

constexpr const char* kOp = "efla::rms_norm";

void check(const Tensor& x, const OptionalTensor& weight, double eps, const OptionalTensor& gate) {
  check_device(kOp, x, "x", x);
  TORCH_CHECK(is_supported(x.scalar_type()), kOp,
              ": x must be float32, float64, bfloat16 or float16, but is ", x.scalar_type(),
              " with shape ", x.sym_sizes());
  TORCH_CHECK(x.dim() >= 1, kOp, ": x must have at least one dimension");
  TORCH_CHECK(eps >= 0, kOp, ": eps must not be negative, but is ", eps);
  if (const Tensor* w = given(weight)) {
    check_device(kOp, x, "weight", *w);
    TORCH_CHECK(w->dim() == 1 && w->sym_size(0) == x.sym_size(-1), kOp,
                ": weight must have shape [D] = [", x.sym_size(-1), "], but has shape ",
                w->sym_sizes(), " (x has shape ", x.sym_sizes(), ")");
    TORCH_CHECK(w->scalar_type() == at::kFloat || w->scalar_type() == x.scalar_type(), kOp,
                ": weight must be float32 or have the dtype of x, ", x.scalar_type(), ", but is ",
                w->scalar_type(), " with shape ", w->sym_sizes());
  }
  if (const Tensor* g = given(gate)) {
    check_device(kOp, x, "gate", *g);
    TORCH_CHECK(g->sym_sizes() == x.sym_sizes() && g->scalar_type() == x.scalar_type(), kOp,
                ": gate must have the shape and dtype of x, ", x.sym_sizes(), " ", x.scalar_type(),
                ", but has ", g->sym_sizes(), " ", g->scalar_type());
  }
}

struct Prepared {
  RmsNormParams params;
  Tensor x, weight, gate;
};

Prepared prepare(const Tensor& x, const OptionalTensor& weight, double eps,
                 const OptionalTensor& gate) {
  const at::ScalarType storage = storage_type(x);
  Prepared out;
  out.x = contiguous(x, storage);
  RmsNormParams& p = out.params;
  p.dim = x.size(-1);
  p.rows = p.dim == 0 ? 0 : x.numel() / p.dim;
  p.dtype = kernel_dtype(storage);
  p.eps = eps;
  p.x = out.x.const_data_ptr();
  if (const Tensor* w = given(weight)) {
    out.weight = contiguous(*w, storage);
    p.weight = out.weight.const_data_ptr();
  }
  if (const Tensor* g = given(gate)) {
    out.gate = contiguous(*g, storage);
    p.gate = out.gate.const_data_ptr();
  }
  return out;
}

Tensor forward_kernel(const Tensor& x, const OptionalTensor& weight, double eps,
                      const OptionalTensor& gate) {
  check(x, weight, eps, gate);
  Prepared prepared = prepare(x, weight, eps, gate);
  Tensor y = at::empty(x.sizes(), prepared.x.options());
  if (y.numel() != 0) {
    prepared.params.y = y.mutable_data_ptr();
    x.is_cuda() ? cuda_rms_norm_forward(kOp, x, prepared.params)
                : cpu::rms_norm_forward(prepared.params, torch_executor());
  }
  return as_dtype(y, x.scalar_type());
}

void check_grad(const Tensor& grad_y, const Tensor& x) {
  check_device(kOp, x, "grad_y", grad_y);
  TORCH_CHECK(grad_y.sym_sizes() == x.sym_sizes() && grad_y.scalar_type() == x.scalar_type(), kOp,
              ": grad_y must have the shape and dtype of x, ", x.sym_sizes(), " ", x.scalar_type(),
              ", but has ", grad_y.sym_sizes(), " ", grad_y.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor> backward_kernel(const Tensor& grad_y, const Tensor& x,
                                                   const OptionalTensor& weight, double eps,
                                                   const OptionalTensor& gate, Wanted wanted) {
  check(x, weight, eps, gate);
  check_grad(grad_y, x);
  wanted[2] = wanted[2] && given(gate);
  const Prepared prepared = prepare(x, weight, eps, gate);
  const auto options = prepared.x.options();
  const auto arithmetic = options.dtype(arithmetic_type(x.scalar_type()));
  const auto like_x = [&](bool is_wanted) {
    return is_wanted ? at::empty(x.sizes(), options) : at::empty({0}, options);
  };
  Tensor grad_x = like_x(wanted[0]);
  Tensor grad_weight = at::empty({wanted[1] ? x.size(-1) : 0}, arithmetic);
  Tensor grad_gate = like_x(wanted[2]);
  if (x.numel() == 0) {
    grad_weight.zero_();
  } else {
    const Tensor grad = contiguous(grad_y, prepared.x.scalar_type());
    RmsNormBackwardParams params;
    params.forward = prepared.params;
    params.grad_y = grad.const_data_ptr();
    if (wanted[0]) params.grad_x = grad_x.mutable_data_ptr();
    if (wanted[1]) params.grad_weight = grad_weight.mutable_data_ptr();
    if (wanted[2]) params.grad_gate = grad_gate.mutable_data_ptr();
    x.is_cuda() ? cuda_rms_norm_backward(kOp, x, params)
                : cpu::rms_norm_backward(params, torch_executor());
  }
  const at::ScalarType weight_type = given(weight) ? weight->scalar_type() : x.scalar_type();
  return {as_dtype(grad_x, x.scalar_type()), as_dtype(grad_weight, weight_type),
          as_dtype(grad_gate, x.scalar_type())};
}

Tensor forward_meta(const Tensor& x, const OptionalTensor& weight, double eps,
                    const OptionalTensor& gate) {
  check(x, weight, eps, gate);
  return at::empty_symint(x.sym_sizes(), x.options());
}

std::tuple<Tensor, Tensor, Tensor> backward_meta(const Tensor& grad_y, const Tensor& x,
                                                 const OptionalTensor& weight, double eps,
                                                 const OptionalTensor& gate, Wanted wanted) {
  check(x, weight, eps, gate);
  check_grad(grad_y, x);
  const auto gradient = [](bool is_wanted, const Tensor& t) {
    return is_wanted ? at::empty_symint(t.sym_sizes(), t.options()) : absent_like(t);
  };
  return {gradient(wanted[0], x), gradient(wanted[1], given(weight) ? *weight : x),
          gradient(wanted[2] && given(gate), x)};
}

Tensor call_forward(const Tensor& x, const OptionalTensor& weight, double eps,
                    const OptionalTensor& gate) {
  static const auto op = find_operator<decltype(forward_kernel)>("efla::_rms_norm_forward");
  return op.call(x, weight, eps, gate);
}

class RmsNormFunction : public torch::autograd::Function<RmsNormFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& weight,
                        double eps, const OptionalTensor& gate) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({x, weight.value_or(Tensor()), gate.value_or(Tensor())});
    ctx->saved_data["eps"] = eps;
    return call_forward(x, weight, eps, gate);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_operator<decltype(backward_kernel)>("efla::_rms_norm_backward");
    const variable_list saved = ctx->get_saved_variables();
    const bool has_weight = saved[1].defined();
    const bool has_gate = saved[2].defined();
    const size_t gate_edge = has_weight ? 2 : 1;  // only tensors that were given have an edge
    const Wanted wanted = {ctx->needs_input_grad(0), has_weight && ctx->needs_input_grad(1),
                           has_gate && ctx->needs_input_grad(gate_edge)};
    variable_list out;
    {
      at::AutoGradMode no_grad(false);
      const auto [grad_x, grad_weight, grad_gate] =
          op.call(grads[0], saved[0], as_optional(saved[1]), ctx->saved_data["eps"].toDouble(),
                  as_optional(saved[2]), wanted);
      out = {or_undefined(grad_x, wanted[0]), or_undefined(grad_weight, wanted[1]),
             or_undefined(grad_gate, wanted[2])};
    }
    out = once_differentiable(kOp, std::move(out));
    return {out[0], out[1], Tensor(), out[2]};  // x, weight, eps, gate
  }
};

Tensor rms_norm_composite(const Tensor& x, const OptionalTensor& weight, double eps,
                          const OptionalTensor& gate) {
  check_device(kOp, x, "x", x);
  if (given(weight)) check_device(kOp, x, "weight", *weight);
  if (given(gate)) check_device(kOp, x, "gate", *gate);
  if (needs_grad(kOp, {&x, given(weight), given(gate)})) {
    return RmsNormFunction::apply(x, weight, eps, gate);
  }
  return call_forward(x, weight, eps, gate);
}

}  // namespace

TORCH_LIBRARY_IMPL(efla, CompositeImplicitAutograd, m) { m.impl("rms_norm", rms_norm_composite); }
TORCH_LIBRARY_IMPL(efla, CPU, m) {
  m.impl("_rms_norm_forward", forward_kernel);
  m.impl("_rms_norm_backward", backward_kernel);
}
#ifdef EFLA_CUDA
TORCH_LIBRARY_IMPL(efla, CUDA, m) {
  m.impl("_rms_norm_forward", forward_kernel);
  m.impl("_rms_norm_backward", backward_kernel);
}
#endif
TORCH_LIBRARY_IMPL(efla, Meta, m) {
  m.impl("_rms_norm_forward", forward_meta);
  m.impl("_rms_norm_backward", backward_meta);
}

}  // namespace efla::ops
