// efla::swiglu: silu(gate) * up.
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

constexpr const char* kOp = "efla::swiglu";

void check_like_gate(const Tensor& gate, const char* name, const Tensor& t) {
  check_device(kOp, gate, name, t);
  TORCH_CHECK(t.sym_sizes() == gate.sym_sizes() && t.scalar_type() == gate.scalar_type(), kOp, ": ",
              name, " must have the shape and dtype of gate, ", gate.sym_sizes(), " ",
              gate.scalar_type(), ", but has ", t.sym_sizes(), " ", t.scalar_type());
}

void check(const Tensor& gate, const Tensor& up) {
  check_device(kOp, gate, "gate", gate);
  TORCH_CHECK(is_supported(gate.scalar_type()), kOp,
              ": gate must be float32, float64, bfloat16 or float16, but is ", gate.scalar_type(),
              " with shape ", gate.sym_sizes());
  check_like_gate(gate, "up", up);
}

SwigluParams params_of(const Tensor& gate, const Tensor& up) {
  SwigluParams p;
  p.count = gate.numel();
  p.dtype = kernel_dtype(gate.scalar_type());
  p.gate = gate.const_data_ptr();
  p.up = up.const_data_ptr();
  return p;
}

Tensor forward_kernel(const Tensor& gate, const Tensor& up) {
  check(gate, up);
  const at::ScalarType storage = storage_type(gate);
  const Tensor g = contiguous(gate, storage);
  const Tensor u = contiguous(up, storage);
  Tensor y = at::empty(gate.sizes(), g.options());
  if (y.numel() != 0) {
    SwigluParams p = params_of(g, u);
    p.y = y.mutable_data_ptr();
    gate.is_cuda() ? cuda_swiglu_forward(kOp, gate, p) : cpu::swiglu_forward(p, torch_executor());
  }
  return as_dtype(y, gate.scalar_type());
}

std::tuple<Tensor, Tensor> backward_kernel(const Tensor& grad_y, const Tensor& gate,
                                           const Tensor& up, std::array<bool, 2> wanted) {
  check(gate, up);
  check_like_gate(gate, "grad_y", grad_y);
  const at::ScalarType storage = storage_type(gate);
  const Tensor g = contiguous(gate, storage);
  const Tensor u = contiguous(up, storage);
  const Tensor grad = contiguous(grad_y, storage);
  Tensor grad_gate = wanted[0] ? at::empty(gate.sizes(), g.options()) : absent_like(g);
  Tensor grad_up = wanted[1] ? at::empty(gate.sizes(), g.options()) : absent_like(g);
  if (gate.numel() != 0) {
    SwigluBackwardParams p;
    p.forward = params_of(g, u);
    p.grad_y = grad.const_data_ptr();
    if (wanted[0]) p.grad_gate = grad_gate.mutable_data_ptr();
    if (wanted[1]) p.grad_up = grad_up.mutable_data_ptr();
    gate.is_cuda() ? cuda_swiglu_backward(kOp, gate, p) : cpu::swiglu_backward(p, torch_executor());
  }
  return {as_dtype(grad_gate, gate.scalar_type()), as_dtype(grad_up, gate.scalar_type())};
}

Tensor forward_meta(const Tensor& gate, const Tensor& up) {
  check(gate, up);
  return at::empty_symint(gate.sym_sizes(), gate.options());
}

std::tuple<Tensor, Tensor> backward_meta(const Tensor& grad_y, const Tensor& gate, const Tensor& up,
                                         std::array<bool, 2> wanted) {
  check(gate, up);
  check_like_gate(gate, "grad_y", grad_y);
  const auto gradient = [&](bool is_wanted) {
    return is_wanted ? at::empty_symint(gate.sym_sizes(), gate.options()) : absent_like(gate);
  };
  return {gradient(wanted[0]), gradient(wanted[1])};
}

Tensor call_forward(const Tensor& gate, const Tensor& up) {
  static const auto op = find_operator<decltype(forward_kernel)>("efla::_swiglu_forward");
  return op.call(gate, up);
}

class SwigluFunction : public torch::autograd::Function<SwigluFunction> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& gate, const Tensor& up) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({gate, up});
    return call_forward(gate, up);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_operator<decltype(backward_kernel)>("efla::_swiglu_backward");
    const variable_list saved = ctx->get_saved_variables();
    const std::array<bool, 2> wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1)};
    variable_list out;
    {
      at::AutoGradMode no_grad(false);
      const auto [grad_gate, grad_up] = op.call(grads[0], saved[0], saved[1], wanted);
      out = {or_undefined(grad_gate, wanted[0]), or_undefined(grad_up, wanted[1])};
    }
    return once_differentiable(kOp, std::move(out));
  }
};

Tensor swiglu_composite(const Tensor& gate, const Tensor& up) {
  check_device(kOp, gate, "gate", gate);
  check_device(kOp, gate, "up", up);
  if (needs_grad(kOp, {&gate, &up})) return SwigluFunction::apply(gate, up);
  return call_forward(gate, up);
}

}  // namespace

TORCH_LIBRARY_IMPL(efla, CompositeImplicitAutograd, m) { m.impl("swiglu", swiglu_composite); }
TORCH_LIBRARY_IMPL(efla, CPU, m) {
  m.impl("_swiglu_forward", forward_kernel);
  m.impl("_swiglu_backward", backward_kernel);
}
#ifdef EFLA_CUDA
TORCH_LIBRARY_IMPL(efla, CUDA, m) {
  m.impl("_swiglu_forward", forward_kernel);
  m.impl("_swiglu_backward", backward_kernel);
}
#endif
TORCH_LIBRARY_IMPL(efla, Meta, m) {
  m.impl("_swiglu_forward", forward_meta);
  m.impl("_swiglu_backward", backward_meta);
}

}  // namespace efla::ops
