// efla::short_conv: causal depthwise convolution over time with its state.
#include <torch/library.h>
#include <torch/torch.h>

#include <array>
#include <tuple>

#include "efla/kernels/cpu/layer_ops.h"
#include "efla/ops/cuda_layer_kernels.h"
#include "efla/ops/device_checks.h"
#include "efla/ops/executor.h"
#include "efla/ops/tensors.h"

namespace efla::ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;
using Wanted = std::array<bool, 4>;  // gradients of x, weight, initial_state, bias

constexpr const char* kOp = "efla::short_conv";

// Checks everything but the values of cu_seqlens; returns N.
c10::SymInt check(const Tensor& x, const Tensor& weight, const OptionalTensor& initial_state,
                  const OptionalTensor& cu_seqlens, const OptionalTensor& bias) {
  check_device(kOp, x, "x", x);
  check_device(kOp, x, "weight", weight);
  TORCH_CHECK(is_supported(x.scalar_type()), kOp,
              ": x must be float32, float64, bfloat16 or float16, but is ", x.scalar_type(),
              " with shape ", x.sym_sizes());
  TORCH_CHECK(x.dim() == 3, kOp, ": x must have shape [B, T, D], but has shape ", x.sym_sizes());
  TORCH_CHECK(weight.dim() == 2 && weight.sym_size(0) == x.sym_size(2) && weight.sym_size(1) >= 1,
              kOp, ": weight must have shape [D, W] with D = ", x.sym_size(2),
              " and W >= 1, but has shape ", weight.sym_sizes(), " (x has shape ", x.sym_sizes(),
              ")");
  TORCH_CHECK(weight.scalar_type() == at::kFloat || weight.scalar_type() == x.scalar_type(), kOp,
              ": weight must be float32 or have the dtype of x, ", x.scalar_type(), ", but is ",
              weight.scalar_type(), " with shape ", weight.sym_sizes());
  if (const Tensor* b = given(bias)) {
    check_device(kOp, x, "bias", *b);
    TORCH_CHECK(b->dim() == 1 && b->sym_size(0) == x.sym_size(2), kOp,
                ": bias must have shape [D] = [", x.sym_size(2), "], but has shape ",
                b->sym_sizes(), " (x has shape ", x.sym_sizes(), ")");
    TORCH_CHECK(b->scalar_type() == at::kFloat || b->scalar_type() == x.scalar_type(), kOp,
                ": bias must be float32 or have the dtype of x, ", x.scalar_type(), ", but is ",
                b->scalar_type(), " with shape ", b->sym_sizes());
  }
  c10::SymInt sequences = x.sym_size(0);
  if (const Tensor* offsets = given(cu_seqlens)) {
    check_device(kOp, x, "cu_seqlens", *offsets);
    check_cu_seqlens(kOp, *offsets, x, "x");
    sequences = offsets->sym_size(0) - 1;
  }
  if (const Tensor* state = given(initial_state)) {
    check_device(kOp, x, "initial_state", *state);
    TORCH_CHECK(state->scalar_type() == x.scalar_type(), kOp,
                ": initial_state must have the dtype of x, ", x.scalar_type(), ", but is ",
                state->scalar_type(), " with shape ", state->sym_sizes());
    TORCH_CHECK(state->dim() == 3 && state->sym_size(0) == sequences &&
                    state->sym_size(1) == x.sym_size(2) && state->sym_size(2) == weight.sym_size(1),
                kOp, ": initial_state must have shape [N, D, W] = [", sequences, ", ",
                x.sym_size(2), ", ", weight.sym_size(1), "], but has shape ", state->sym_sizes(),
                " (x has shape ", x.sym_sizes(), ", weight ", weight.sym_sizes(), ")");
  }
  return sequences;
}

View view_of_rows(const Tensor& t) { return {t.const_data_ptr(), t.stride(0), t.stride(1), 0}; }
MutableView mutable_view_of_rows(const Tensor& t) {
  return {t.mutable_data_ptr(), t.stride(0), t.stride(1), 0};
}

struct Prepared {
  ShortConvParams params;
  Tensor x, weight, bias, initial_state;
  std::vector<int64_t> offsets;  // cu_seqlens on the CPU,
  Tensor device_offsets;         // or on a GPU
  bool empty() const { return params.tokens == 0 || params.sequences == 0 || params.channels == 0; }
};

void prepare(const Tensor& x, const Tensor& weight, bool silu, const OptionalTensor& initial_state,
             const OptionalTensor& cu_seqlens, const OptionalTensor& bias, Prepared& out) {
  const at::ScalarType storage = storage_type(x);
  out.x = with_contiguous_rows(as_dtype(x, storage));
  out.weight = contiguous(weight, storage);
  ShortConvParams& p = out.params;
  p.batch = x.size(0);
  p.tokens = x.size(1);
  p.channels = x.size(2);
  p.width = weight.size(1);
  p.sequences = p.batch;
  p.dtype = kernel_dtype(storage);
  p.silu = silu;
  p.x = view_of_rows(out.x);
  p.weight = out.weight.const_data_ptr();
  if (const Tensor* offsets = given(cu_seqlens)) {
    if (x.is_cuda()) {
      out.device_offsets = checked_offsets(kOp, *offsets, p.tokens);
      p.cu_seqlens = out.device_offsets.const_data_ptr<int64_t>();
    } else {
      out.offsets = read_offsets(kOp, *offsets, p.tokens);
      p.cu_seqlens = out.offsets.data();
    }
    p.sequences = offsets->size(0) - 1;
  }
  if (const Tensor* b = given(bias)) {
    out.bias = contiguous(*b, storage);
    p.bias = out.bias.const_data_ptr();
  }
  if (const Tensor* state = given(initial_state)) {
    out.initial_state = contiguous(*state, storage);
    p.initial_state = out.initial_state.const_data_ptr();
  }
}

std::tuple<Tensor, Tensor> forward_kernel(const Tensor& x, const Tensor& weight, bool silu,
                                          const OptionalTensor& initial_state,
                                          bool output_final_state, const OptionalTensor& cu_seqlens,
                                          const OptionalTensor& bias) {
  check(x, weight, initial_state, cu_seqlens, bias);
  throw_pending_error(x);
  Prepared prepared;
  prepare(x, weight, silu, initial_state, cu_seqlens, bias, prepared);
  ShortConvParams& p = prepared.params;
  const auto options = prepared.x.options();
  Tensor y = at::empty(x.sizes(), options);
  Tensor final_state = output_final_state ? at::empty({p.sequences, p.channels, p.width}, options)
                                          : at::empty({0}, options);
  if (prepared.empty()) {
    y.zero_();
    if (output_final_state) {
      prepared.initial_state.defined() ? final_state.copy_(prepared.initial_state)
                                       : final_state.zero_();
    }
  } else {
    p.y = mutable_view_of_rows(y);
    if (output_final_state) p.final_state = final_state.mutable_data_ptr();
    x.is_cuda() ? cuda_short_conv_forward(kOp, x, p) : cpu::short_conv_forward(p, torch_executor());
  }
  return {as_dtype(y, x.scalar_type()), as_dtype(final_state, x.scalar_type())};
}

void check_backward(const Tensor& grad_y, const OptionalTensor& grad_final_state, const Tensor& x,
                    const Tensor& weight, const c10::SymInt& n) {
  check_device(kOp, x, "grad_y", grad_y);
  TORCH_CHECK(grad_y.sym_sizes() == x.sym_sizes() && grad_y.scalar_type() == x.scalar_type(), kOp,
              ": grad_y must have the shape and dtype of x, ", x.sym_sizes(), " ", x.scalar_type(),
              ", but has ", grad_y.sym_sizes(), " ", grad_y.scalar_type());
  if (const Tensor* g = given(grad_final_state)) {
    TORCH_CHECK(g->dim() == 3 && g->sym_size(0) == n && g->sym_size(1) == x.sym_size(2) &&
                    g->sym_size(2) == weight.sym_size(1) && g->scalar_type() == x.scalar_type(),
                kOp, ": grad_final_state must have shape [N, D, W] = [", n, ", ", x.sym_size(2),
                ", ", weight.sym_size(1), "] and the dtype of x, but has ", g->sym_sizes(), " ",
                g->scalar_type());
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_kernel(
    const Tensor& grad_y, const OptionalTensor& grad_final_state, const Tensor& x,
    const Tensor& weight, bool silu, const OptionalTensor& initial_state,
    const OptionalTensor& cu_seqlens, const OptionalTensor& bias, Wanted wanted) {
  const c10::SymInt n = check(x, weight, initial_state, cu_seqlens, bias);
  check_backward(grad_y, grad_final_state, x, weight, n);
  throw_pending_error(x);
  wanted[3] = wanted[3] && given(bias);
  Prepared prepared;
  prepare(x, weight, silu, initial_state, cu_seqlens, bias, prepared);
  ShortConvBackwardParams params;
  params.forward = prepared.params;
  const ShortConvParams& p = params.forward;
  const auto options = prepared.x.options();
  const auto buffer = [](bool is_wanted, at::IntArrayRef sizes, const at::TensorOptions& type) {
    return is_wanted ? at::empty(sizes, type) : at::empty({0}, type);
  };
  // A float32 weight of a bfloat16 x gets its gradient as it was summed, without a rounding.
  const auto arithmetic = options.dtype(arithmetic_type(x.scalar_type()));
  Tensor grad_x = buffer(wanted[0], x.sizes(), options);
  Tensor grad_weight = buffer(wanted[1], weight.sizes(), arithmetic);
  Tensor grad_state = buffer(wanted[2], {p.sequences, p.channels, p.width}, options);
  Tensor grad_bias = buffer(wanted[3], {p.channels}, arithmetic);
  Tensor grad_final;
  if (const Tensor* g = given(grad_final_state)) grad_final = contiguous(*g, grad_x.scalar_type());
  if (prepared.empty()) {
    grad_x.zero_();
    grad_weight.zero_();
    grad_bias.zero_();
    if (wanted[2]) grad_final.defined() ? grad_state.copy_(grad_final) : grad_state.zero_();
  } else {
    const Tensor grad = with_contiguous_rows(as_dtype(grad_y, grad_x.scalar_type()));
    params.grad_y = view_of_rows(grad);
    if (wanted[0]) params.grad_x = mutable_view_of_rows(grad_x);
    if (wanted[1]) params.grad_weight = grad_weight.mutable_data_ptr();
    if (wanted[3]) params.grad_bias = grad_bias.mutable_data_ptr();
    if (grad_final.defined()) params.grad_final_state = grad_final.const_data_ptr();
    if (wanted[2]) params.grad_initial_state = grad_state.mutable_data_ptr();
    x.is_cuda() ? cuda_short_conv_backward(kOp, x, params)
                : cpu::short_conv_backward(params, torch_executor());
  }
  const at::ScalarType bias_type = given(bias) ? bias->scalar_type() : x.scalar_type();
  return {as_dtype(grad_x, x.scalar_type()), as_dtype(grad_weight, weight.scalar_type()),
          as_dtype(grad_state, x.scalar_type()), as_dtype(grad_bias, bias_type)};
}

std::tuple<Tensor, Tensor> forward_meta(const Tensor& x, const Tensor& weight, bool silu,
                                        const OptionalTensor& initial_state,
                                        bool output_final_state, const OptionalTensor& cu_seqlens,
                                        const OptionalTensor& bias) {
  const c10::SymInt n = check(x, weight, initial_state, cu_seqlens, bias);
  return {at::empty_symint(x.sym_sizes(), x.options()),
          output_final_state ? at::empty_symint({n, x.sym_size(2), weight.sym_size(1)}, x.options())
                             : absent_like(x)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_meta(
    const Tensor& grad_y, const OptionalTensor& grad_final_state, const Tensor& x,
    const Tensor& weight, bool silu, const OptionalTensor& initial_state,
    const OptionalTensor& cu_seqlens, const OptionalTensor& bias, Wanted wanted) {
  const c10::SymInt n = check(x, weight, initial_state, cu_seqlens, bias);
  check_backward(grad_y, grad_final_state, x, weight, n);
  const auto gradient = [](bool is_wanted, c10::SymIntArrayRef sizes, const Tensor& like) {
    return is_wanted ? at::empty_symint(sizes, like.options()) : absent_like(like);
  };
  const std::array<c10::SymInt, 3> state_sizes{n, x.sym_size(2), weight.sym_size(1)};
  return {
      gradient(wanted[0], x.sym_sizes(), x), gradient(wanted[1], weight.sym_sizes(), weight),
      gradient(wanted[2], state_sizes, x),
      gradient(wanted[3] && given(bias), weight.sym_sizes().slice(0, 1), given(bias) ? *bias : x)};
}

std::tuple<Tensor, Tensor> call_forward(const Tensor& x, const Tensor& weight, bool silu,
                                        const OptionalTensor& initial_state,
                                        bool output_final_state, const OptionalTensor& cu_seqlens,
                                        const OptionalTensor& bias) {
  static const auto op = find_operator<decltype(forward_kernel)>("efla::_short_conv_forward");
  return op.call(x, weight, silu, initial_state, output_final_state, cu_seqlens, bias);
}

class ShortConvFunction : public torch::autograd::Function<ShortConvFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                               const OptionalTensor& bias, bool silu,
                               const OptionalTensor& initial_state, bool output_final_state,
                               const OptionalTensor& cu_seqlens) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [y, final_state] =
        call_forward(x, weight, silu, initial_state, output_final_state, cu_seqlens, bias);
    ctx->save_for_backward({x, weight, initial_state.value_or(Tensor()),
                            cu_seqlens.value_or(Tensor()), bias.value_or(Tensor())});
    ctx->saved_data["silu"] = silu;
    ctx->set_materialize_grads(false);
    if (!output_final_state) ctx->mark_non_differentiable({final_state});
    return {y, final_state};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_operator<decltype(backward_kernel)>("efla::_short_conv_backward");
    const variable_list saved = ctx->get_saved_variables();
    const bool has_state = saved[2].defined(), has_bias = saved[4].defined();
    const size_t state_edge = has_bias ? 3 : 2;  // only tensors that were given have an edge
    const Wanted wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                           has_state && ctx->needs_input_grad(state_edge),
                           has_bias && ctx->needs_input_grad(2)};
    const Tensor grad_y =
        grads[0].defined() ? grads[0] : at::zeros_symint(saved[0].sym_sizes(), saved[0].options());
    variable_list out;
    {
      at::AutoGradMode no_grad(false);
      const auto [grad_x, grad_weight, grad_state, grad_bias] = op.call(
          grad_y, as_optional(grads[1]), saved[0], saved[1], ctx->saved_data["silu"].toBool(),
          as_optional(saved[2]), as_optional(saved[3]), as_optional(saved[4]), wanted);
      out = {or_undefined(grad_x, wanted[0]), or_undefined(grad_weight, wanted[1]),
             or_undefined(grad_state, wanted[2]), or_undefined(grad_bias, wanted[3])};
    }
    out = once_differentiable(kOp, std::move(out));
    // Positions of forward's arguments: x, weight, bias, silu, initial_state, output_final_state,
    // cu_seqlens.
    return {out[0], out[1], out[3], Tensor(), out[2], Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor> short_conv_composite(const Tensor& x, const Tensor& weight, bool silu,
                                                const OptionalTensor& initial_state,
                                                bool output_final_state,
                                                const OptionalTensor& given_offsets,
                                                const OptionalTensor& bias) {
  check_device(kOp, x, "x", x);
  check_device(kOp, x, "weight", weight);
  if (given(initial_state)) check_device(kOp, x, "initial_state", *initial_state);
  if (given(given_offsets)) check_cu_seqlens(kOp, *given_offsets, x, "x");
  const OptionalTensor cu_seqlens = offsets_beside(kOp, x, given_offsets);
  if (given(cu_seqlens)) check_device(kOp, x, "cu_seqlens", *cu_seqlens);
  if (given(bias)) check_device(kOp, x, "bias", *bias);
  if (needs_grad(kOp, {&x, &weight, given(initial_state), given(bias)})) {
    const variable_list out = ShortConvFunction::apply(x, weight, bias, silu, initial_state,
                                                       output_final_state, cu_seqlens);
    return {out[0], out[1]};
  }
  return call_forward(x, weight, silu, initial_state, output_final_state, cu_seqlens, bias);
}

}  // namespace

TORCH_LIBRARY_IMPL(efla, CompositeImplicitAutograd, m) {
  m.impl("short_conv", short_conv_composite);
}
TORCH_LIBRARY_IMPL(efla, CPU, m) {
  m.impl("_short_conv_forward", forward_kernel);
  m.impl("_short_conv_backward", backward_kernel);
}
#ifdef EFLA_CUDA
TORCH_LIBRARY_IMPL(efla, CUDA, m) {
  m.impl("_short_conv_forward", forward_kernel);
  m.impl("_short_conv_backward", backward_kernel);
}
#endif
TORCH_LIBRARY_IMPL(efla, Meta, m) {
  m.impl("_short_conv_forward", forward_meta);
  m.impl("_short_conv_backward", backward_meta);
}

}  // namespace efla::ops
