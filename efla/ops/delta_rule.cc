// efla::chunk and efla::recurrent: kernels for CPU, CUDA and Meta behind two internal operators,
// _delta_rule_forward and _delta_rule_backward, and the autograd function that joins them.
//
// The public operators are composite: torch.compile traces through them to the internal pair.
#include "efla/kernels/cpu/delta_rule.h"

#include <torch/library.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <vector>

#include "efla/ops/cuda_kernels.h"
#include "efla/ops/delta_rule_arguments.h"
#include "efla/ops/device_checks.h"
#include "efla/ops/executor.h"
#include "efla/ops/tensors.h"

namespace efla::ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;
using ForwardResult = std::tuple<Tensor, Tensor, Tensor>;  // o, final state, kept states
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Positions in Gradients and in `wanted`.
enum GradientIndex {
  kGradQ,
  kGradK,
  kGradV,
  kGradBeta,
  kGradLogDecay,
  kGradInitialState,
  kGradients
};

const char* name_of(bool sequential) { return sequential ? "efla::recurrent" : "efla::chunk"; }

at::TensorOptions arithmetic_options(const Tensor& q) {
  return q.options().dtype(arithmetic_type(q.scalar_type()));
}

// The CUDA kernels recompute the states instead, or keep what no shape tells (cuda_forward). Asked
// of fake tensors too, which know their device; inside a Meta kernel it is always true, and
// harmless.
bool keeps_states(const Tensor& q) { return !q.is_cuda(); }

// Rows of the kept states; the symbolic twin of checkpoint_rows().
c10::SymInt symbolic_checkpoint_rows(const SymbolicShape& s, const c10::SymInt& sequences,
                                     bool packed) {
  const c10::SymInt per = (s.tokens + (kCheckpointTokens - 1)) / kCheckpointTokens;
  return packed ? per + sequences : s.batch * per;
}

void check_backward(const DeltaRuleArguments& a, const SymbolicShape& s, const c10::SymInt& n,
                    const Tensor& grad_o, const OptionalTensor& grad_final_state,
                    const OptionalTensor& cu_seqlens, const Tensor& states, bool recompute) {
  check_device(a.op, a.q, "grad_o", grad_o);
  TORCH_CHECK(grad_o.sym_sizes() == a.v.sym_sizes() && grad_o.scalar_type() == a.q.scalar_type(),
              a.op, ": grad_o must have the shape of v, ", a.v.sym_sizes(),
              ", and the dtype of q, ", a.q.scalar_type(), ", but has shape ", grad_o.sym_sizes(),
              " and dtype ", grad_o.scalar_type());
  if (const Tensor* g = given(grad_final_state)) {
    check_state(a.op, "grad_final_state", *g, "N", n, a, s);
  }
  // [0] where none were kept; fake CUDA tensors arrive here as meta tensors.
  if ((a.q.is_cpu() && !recompute) || states.dim() != 1) {
    check_state(a.op, "states", states, "rows", symbolic_checkpoint_rows(s, n, given(cu_seqlens)),
                a, s);
  }
}

// --- CPU and CUDA ------------------------------------------------------------------------------

ForwardResult forward_kernel(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                             const OptionalTensor& log_decay, const OptionalTensor& initial_state,
                             const OptionalTensor& cu_seqlens, c10::string_view rule,
                             std::optional<double> scale, bool output_final_state, bool qk_l2norm,
                             bool sequential, bool keep_states) {
  const DeltaRuleArguments a{name_of(sequential), q, k, v, beta, log_decay, rule, scale, qk_l2norm};
  check_sequences(a, check_arguments(a), initial_state, cu_seqlens);
  throw_pending_error(q);
  ForwardParams params;
  PreparedProblem prepared;
  prepare_problem(a, initial_state, cu_seqlens, prepared);
  params.problem = prepared.problem;
  const Shape& s = params.problem.shape;

  const auto state_options = arithmetic_options(q);
  Tensor o = at::empty(v.sizes(), prepared.v.options());
  Tensor final_state =
      output_final_state
          ? at::empty({s.sequences, s.value_heads, s.key_dim, s.value_dim}, state_options)
          : at::empty({0}, state_options);
  Tensor states = at::empty({0}, state_options);
  if (keep_states) {
    // Zeroed: packed sequences leave rows unused, and an operator's result must be determined.
    const std::array<int64_t, 4> sizes = {checkpoint_rows(s, prepared.packed()), s.value_heads,
                                          s.key_dim, s.value_dim};
    states = prepared.packed() ? at::zeros(sizes, state_options) : at::empty(sizes, state_options);
  }
  if (prepared.empty()) {
    o.zero_();
    if (output_final_state) {
      prepared.initial_state.defined() ? final_state.copy_(prepared.initial_state)
                                       : final_state.zero_();
    }
    return {as_dtype(o, q.scalar_type()), final_state, states};
  }

  params.o = mutable_view_of(o);
  if (output_final_state) params.final_state = final_state.mutable_data_ptr();
  if (keep_states) params.checkpoints = states.mutable_data_ptr();
  if (q.is_cuda()) {
    states = cuda_forward(a, params, sequential);
  } else {
    const Executor executor = torch_executor();
    sequential ? cpu::recurrent_forward(params, executor) : cpu::chunk_forward(params, executor);
  }
  return {as_dtype(o, q.scalar_type()), final_state, states};
}

// Writes the gradients that are wanted into `g` (the others have no elements), which may be slices
// of tensors. The arguments are checked; grad_o and grad_final_state are readable, `states` is what
// the forward kept.
void run_backward(const DeltaRuleArguments& a, const PreparedProblem& prepared,
                  const Tensor& grad_o, const Tensor& grad_final_state, const Tensor& states,
                  const std::array<Tensor, kGradients>& g) {
  BackwardParams params;
  params.problem = prepared.problem;
  const auto wanted = [&](GradientIndex i) { return g[i].dim() > 1; };
  if (prepared.empty()) {
    for (const Tensor& t : g) t.zero_();
    if (wanted(kGradInitialState) && grad_final_state.defined()) {
      g[kGradInitialState].copy_(grad_final_state);
    }
    return;
  }
  const Tensor kept = states.contiguous();
  params.grad_o = view_of(grad_o);
  params.checkpoints = kept.const_data_ptr();
  if (grad_final_state.defined()) params.grad_final_state = grad_final_state.const_data_ptr();
  if (wanted(kGradQ)) params.grad_q = mutable_view_of(g[kGradQ]);
  if (wanted(kGradK)) params.grad_k = mutable_view_of(g[kGradK]);
  if (wanted(kGradV)) params.grad_v = mutable_view_of(g[kGradV]);
  if (wanted(kGradBeta)) params.grad_beta = mutable_view_of(g[kGradBeta]);
  if (wanted(kGradLogDecay)) params.grad_log_decay = mutable_view_of(g[kGradLogDecay]);
  if (wanted(kGradInitialState)) {
    params.grad_initial_state = g[kGradInitialState].mutable_data_ptr();
  }
  a.q.is_cuda() ? cuda_backward(a, params, kept) : cpu::chunk_backward(params, torch_executor());
}

void run_backward(const DeltaRuleArguments& a, const OptionalTensor& initial_state,
                  const OptionalTensor& cu_seqlens, const Tensor& grad_o,
                  const Tensor& grad_final_state, const Tensor& states,
                  const std::array<Tensor, kGradients>& g) {
  PreparedProblem prepared;
  prepare_problem(a, initial_state, cu_seqlens, prepared);
  run_backward(a, prepared, grad_o, grad_final_state, states, g);
}

// What a forward leaves for the backward of the same arguments, made again; on a GPU that is
// nothing. And the final state.
ForwardResult forward_again(const DeltaRuleArguments& a, const OptionalTensor& initial_state,
                            const OptionalTensor& cu_seqlens) {
  return forward_kernel(a.q, a.k, a.v, a.beta, a.log_decay, initial_state, cu_seqlens,
                        c10::string_view(a.rule.data(), a.rule.size()), a.scale,
                        /*output_final_state=*/true, a.qk_l2norm, /*sequential=*/false,
                        keeps_states(a.q));
}

// The same as run_backward() with half of its workspace and nothing that a forward kept. The second
// half of the tokens first, from the state between the halves, which is in `first`, what the
// forward of the first half gives.
void run_backward_by_tokens(const DeltaRuleArguments& a, const OptionalTensor& initial_state,
                            const Tensor& grad_o, const Tensor& grad_final_state,
                            const std::vector<ArgumentsSlice>& halves, const ForwardResult& first,
                            const std::array<Tensor, kGradients>& g) {
  const auto& [unused, middle, first_states] = first;
  const auto slices = [&](const ArgumentsSlice& half, const Tensor& grad_initial_state) {
    std::array<Tensor, kGradients> slice;
    for (int i = 0; i < kGradInitialState; ++i) slice[i] = g[i].dim() > 1 ? half.of(g[i]) : g[i];
    slice[kGradInitialState] = grad_initial_state;
    return slice;
  };
  const Tensor grad_middle = at::empty_like(middle);
  const DeltaRuleArguments second = halves[1].arguments(a);
  const Tensor states =
      keeps_states(a.q) ? std::get<2>(forward_again(second, middle, {})) : at::empty({0});
  run_backward(second, middle, {}, halves[1].of(grad_o), grad_final_state, states,
               slices(halves[1], grad_middle));
  run_backward(halves[0].arguments(a), initial_state, {}, halves[0].of(grad_o), grad_middle,
               first_states, slices(halves[0], g[kGradInitialState]));
}

// The same for packed sequences, half of the heads at a time.
void run_backward_by_heads(const DeltaRuleArguments& a, const OptionalTensor& initial_state,
                           const OptionalTensor& cu_seqlens, const Tensor& grad_o,
                           const Tensor& grad_final_state,
                           const std::array<Tensor, kGradients>& g) {
  const int64_t heads = a.q.size(2);
  for (int64_t begin = 0, count = (heads + 1) / 2; begin < heads; begin += count) {
    const ArgumentsSlice half(a, 2, begin, std::min(count, heads - begin));
    const DeltaRuleArguments part = half.arguments(a);
    const auto state = [&](const Tensor& t) { return half.of(t, 1).contiguous(); };
    OptionalTensor initial;
    if (const Tensor* t = given(initial_state)) initial = state(*t);
    std::array<Tensor, kGradients> slice;
    for (int i = 0; i < kGradients; ++i) {
      slice[i] = g[i].dim() <= 1          ? g[i]
                 : i == kGradInitialState ? at::empty(half.of(g[i], 1).sizes(), g[i].options())
                                          : half.of(g[i]);
    }
    const Tensor states =
        keeps_states(a.q) ? std::get<2>(forward_again(part, initial, cu_seqlens)) : at::empty({0});
    run_backward(part, initial, cu_seqlens, half.of(grad_o),
                 grad_final_state.defined() ? state(grad_final_state) : Tensor(), states, slice);
    if (g[kGradInitialState].dim() > 1) {
      half.of(g[kGradInitialState], 1).copy_(slice[kGradInitialState]);
    }
  }
}

Gradients backward_kernel(const Tensor& grad_o, const OptionalTensor& grad_final_state,
                          const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                          const OptionalTensor& log_decay, const OptionalTensor& initial_state,
                          const OptionalTensor& cu_seqlens, const Tensor& states,
                          c10::string_view rule, std::optional<double> scale, bool qk_l2norm,
                          bool recompute, std::array<bool, kGradients> wanted) {
  const DeltaRuleArguments a{
      "efla::chunk backward", q, k, v, beta, log_decay, rule, scale, qk_l2norm};
  const SymbolicShape shape = check_arguments(a);
  const c10::SymInt n = check_sequences(a, shape, initial_state, cu_seqlens);
  check_backward(a, shape, n, grad_o, grad_final_state, cu_seqlens, states, recompute);
  throw_pending_error(q);
  // As the kernels read them; halves are slices of these.
  PreparedProblem prepared;
  prepare_problem(a, initial_state, cu_seqlens, prepared);
  const OptionalTensor decay = as_optional(prepared.log_decay);
  const DeltaRuleArguments readable{a.op,  prepared.q, prepared.k, prepared.v, prepared.beta,
                                    decay, a.rule,     a.scale,    a.qk_l2norm};
  const Shape& s = prepared.problem.shape;
  const at::ScalarType arithmetic = arithmetic_type(q.scalar_type());
  const at::ScalarType storage = prepared.q.scalar_type();

  // Halves of whole chunks. What this forward needs is free again before there are gradients.
  const int64_t half = (s.tokens + 127) / 128 * 64;
  const bool by_tokens = recompute && !prepared.packed() && half < s.tokens && !prepared.empty();
  const bool by_heads = recompute && prepared.packed() && !prepared.empty();
  std::vector<ArgumentsSlice> halves;
  ForwardResult first;
  if (by_tokens) {
    halves.emplace_back(readable, 1, 0, half);
    halves.emplace_back(readable, 1, half, s.tokens - half);
    first = forward_again(halves[0].arguments(readable), initial_state, {});
    std::get<0>(first).reset();
  }

  // Buffers in the types that the kernel writes; a float32 beta of a bfloat16 problem needs no
  // cast.
  const auto buffer = [&](GradientIndex i, at::IntArrayRef sizes, at::ScalarType dtype) {
    return wanted[i] ? at::empty(sizes, q.options().dtype(dtype)) : at::empty({0}, q.options());
  };
  std::array<Tensor, kGradients> g;
  g[kGradQ] = buffer(kGradQ, q.sizes(), storage);
  g[kGradK] = buffer(kGradK, k.sizes(), storage);
  g[kGradV] = buffer(kGradV, v.sizes(), storage);
  g[kGradBeta] = buffer(kGradBeta, beta.sizes(), arithmetic);
  g[kGradLogDecay] = buffer(kGradLogDecay, beta.sizes(), arithmetic);
  g[kGradInitialState] =
      buffer(kGradInitialState, {s.sequences, s.value_heads, s.key_dim, s.value_dim}, arithmetic);

  const Tensor grad = with_readable_rows(as_dtype(grad_o, storage));
  Tensor grad_final;
  if (const Tensor* t = given(grad_final_state)) grad_final = with_readable_rows(t->contiguous());
  if (by_tokens) {
    run_backward_by_tokens(readable, initial_state, grad, grad_final, halves, first, g);
  } else if (by_heads) {
    run_backward_by_heads(readable, initial_state, cu_seqlens, grad, grad_final, g);
  } else {
    const bool again = recompute && keeps_states(q) && !prepared.empty();
    const Tensor kept =
        again ? std::get<2>(forward_again(readable, initial_state, cu_seqlens)) : states;
    run_backward(a, prepared, grad, grad_final, kept, g);
  }
  const at::ScalarType decay_type = given(log_decay) ? log_decay->scalar_type() : arithmetic;
  return {as_dtype(g[kGradQ], q.scalar_type()),   as_dtype(g[kGradK], q.scalar_type()),
          as_dtype(g[kGradV], q.scalar_type()),   as_dtype(g[kGradBeta], beta.scalar_type()),
          as_dtype(g[kGradLogDecay], decay_type), as_dtype(g[kGradInitialState], arithmetic)};
}

// --- Meta --------------------------------------------------------------------------------------

ForwardResult forward_meta(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                           const OptionalTensor& log_decay, const OptionalTensor& initial_state,
                           const OptionalTensor& cu_seqlens, c10::string_view rule,
                           std::optional<double> scale, bool output_final_state, bool qk_l2norm,
                           bool sequential, bool keep_states) {
  const DeltaRuleArguments a{name_of(sequential), q, k, v, beta, log_decay, rule, scale, qk_l2norm};
  const SymbolicShape s = check_arguments(a);
  const c10::SymInt n = check_sequences(a, s, initial_state, cu_seqlens);
  const auto state_options = arithmetic_options(q);
  const auto states_of = [&](bool wanted, const c10::SymInt& rows) {
    return wanted ? at::empty_symint({rows, s.value_heads, s.key_dim, s.value_dim}, state_options)
                  : at::empty({0}, state_options);
  };
  return {at::empty_symint(v.sym_sizes(), q.options()), states_of(output_final_state, n),
          states_of(keep_states, symbolic_checkpoint_rows(s, n, given(cu_seqlens)))};
}

Gradients backward_meta(const Tensor& grad_o, const OptionalTensor& grad_final_state,
                        const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                        const OptionalTensor& log_decay, const OptionalTensor& initial_state,
                        const OptionalTensor& cu_seqlens, const Tensor& states,
                        c10::string_view rule, std::optional<double> scale, bool qk_l2norm,
                        bool recompute, std::array<bool, kGradients> wanted) {
  const DeltaRuleArguments a{
      "efla::chunk backward", q, k, v, beta, log_decay, rule, scale, qk_l2norm};
  const SymbolicShape s = check_arguments(a);
  const c10::SymInt n = check_sequences(a, s, initial_state, cu_seqlens);
  check_backward(a, s, n, grad_o, grad_final_state, cu_seqlens, states, recompute);
  const at::ScalarType arithmetic = arithmetic_type(q.scalar_type());
  const auto buffer = [&](GradientIndex i, c10::SymIntArrayRef sizes, at::ScalarType dtype) {
    const auto options = q.options().dtype(dtype);
    return wanted[i] ? at::empty_symint(sizes, options) : at::empty({0}, options);
  };
  const at::ScalarType decay_type = given(log_decay) ? log_decay->scalar_type() : arithmetic;
  const std::array<c10::SymInt, 4> state_sizes{n, s.value_heads, s.key_dim, s.value_dim};
  return {buffer(kGradQ, q.sym_sizes(), q.scalar_type()),
          buffer(kGradK, k.sym_sizes(), q.scalar_type()),
          buffer(kGradV, v.sym_sizes(), q.scalar_type()),
          buffer(kGradBeta, beta.sym_sizes(), beta.scalar_type()),
          buffer(kGradLogDecay, beta.sym_sizes(), decay_type),
          buffer(kGradInitialState, state_sizes, arithmetic)};
}

// --- Autograd ----------------------------------------------------------------------------------

ForwardResult call_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                           const OptionalTensor& log_decay, const OptionalTensor& initial_state,
                           const OptionalTensor& cu_seqlens, c10::string_view rule,
                           std::optional<double> scale, bool output_final_state, bool qk_l2norm,
                           bool sequential, bool keep_states) {
  static const auto op = find_operator<decltype(forward_kernel)>("efla::_delta_rule_forward");
  return op.call(q, k, v, beta, log_decay, initial_state, cu_seqlens, rule, scale,
                 output_final_state, qk_l2norm, sequential, keep_states);
}

Gradients call_backward(const Tensor& grad_o, const OptionalTensor& grad_final_state,
                        const variable_list& saved, c10::string_view rule,
                        std::optional<double> scale, bool qk_l2norm, bool recompute,
                        std::array<bool, kGradients> wanted) {
  static const auto op = find_operator<decltype(backward_kernel)>("efla::_delta_rule_backward");
  return op.call(grad_o, grad_final_state, saved[0], saved[1], saved[2], saved[3],
                 as_optional(saved[4]), as_optional(saved[5]), as_optional(saved[6]), saved[7],
                 rule, scale, qk_l2norm, recompute, wanted);
}

class DeltaRuleFunction : public torch::autograd::Function<DeltaRuleFunction> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k,
                               const Tensor& v, const Tensor& beta, const OptionalTensor& log_decay,
                               const OptionalTensor& initial_state,
                               const OptionalTensor& cu_seqlens, const std::string& rule,
                               std::optional<double> scale, bool output_final_state, bool qk_l2norm,
                               bool recompute, bool sequential) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [o, final_state, states] =
        call_forward(q, k, v, beta, log_decay, initial_state, cu_seqlens, rule, scale,
                     output_final_state, qk_l2norm, sequential, keeps_states(q) && !recompute);
    if (recompute) states = at::empty({0}, states.options());  // nor what cuda_forward() left
    ctx->save_for_backward({q, k, v, beta, log_decay.value_or(Tensor()),
                            initial_state.value_or(Tensor()), cu_seqlens.value_or(Tensor()),
                            states});
    ctx->saved_data["rule"] = rule;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["qk_l2norm"] = qk_l2norm;
    ctx->saved_data["recompute"] = recompute;
    ctx->set_materialize_grads(false);
    if (!output_final_state) ctx->mark_non_differentiable({final_state});
    return {o, final_state};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const bool has_decay = saved[4].defined();
    const bool has_state = saved[5].defined();
    const size_t state_edge = has_decay ? 5 : 4;  // only tensors that were given have an edge
    const std::array<bool, kGradients> wanted = {ctx->needs_input_grad(0),
                                                 ctx->needs_input_grad(1),
                                                 ctx->needs_input_grad(2),
                                                 ctx->needs_input_grad(3),
                                                 has_decay && ctx->needs_input_grad(4),
                                                 has_state && ctx->needs_input_grad(state_edge)};
    const Tensor grad_o =
        grads[0].defined() ? grads[0] : at::zeros_symint(saved[2].sym_sizes(), saved[0].options());

    variable_list out;
    {
      at::AutoGradMode no_grad(false);
      auto g = call_backward(
          grad_o, as_optional(grads[1]), saved, ctx->saved_data["rule"].toStringRef(),
          ctx->saved_data["scale"].toOptional<double>(), ctx->saved_data["qk_l2norm"].toBool(),
          ctx->saved_data["recompute"].toBool(), wanted);
      out = {std::get<0>(g), std::get<1>(g), std::get<2>(g),
             std::get<3>(g), std::get<4>(g), std::get<5>(g)};
      for (size_t i = 0; i < out.size(); ++i) out[i] = or_undefined(out[i], wanted[i]);
    }
    out = once_differentiable("efla::chunk and efla::recurrent", std::move(out));
    out.resize(13);  // cu_seqlens and the arguments that are no tensors
    return out;
  }
};

std::tuple<Tensor, Tensor> run(bool sequential, const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& beta, const OptionalTensor& log_decay,
                               c10::string_view rule, std::optional<double> scale,
                               const OptionalTensor& initial_state, bool output_final_state,
                               const OptionalTensor& given_offsets, bool qk_l2norm,
                               bool recompute) {
  // Before the dispatcher chooses a backend: otherwise mixed devices give its message, not ours.
  const char* op = name_of(sequential);
  check_device(op, q, "q", q);
  check_device(op, q, "k", k);
  check_device(op, q, "v", v);
  check_device(op, q, "beta", beta);
  if (given(log_decay)) check_device(op, q, "log_decay", *log_decay);
  if (given(initial_state)) check_device(op, q, "initial_state", *initial_state);
  const OptionalTensor cu_seqlens = offsets_beside(op, q, given_offsets);
  if (given(cu_seqlens)) check_device(op, q, "cu_seqlens", *cu_seqlens);

  if (needs_grad(op, {&q, &k, &v, &beta, given(log_decay), given(initial_state)})) {
    const variable_list out = DeltaRuleFunction::apply(
        q, k, v, beta, log_decay, initial_state, cu_seqlens, std::string(rule), scale,
        output_final_state, qk_l2norm, recompute, sequential);
    return {out[0], out[1]};
  }
  auto [o, final_state, states] =
      call_forward(q, k, v, beta, log_decay, initial_state, cu_seqlens, rule, scale,
                   output_final_state, qk_l2norm, sequential, /*keep_states=*/false);
  return {o, final_state};
}

template <bool kSequential>
std::tuple<Tensor, Tensor> composite(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const Tensor& beta, const OptionalTensor& log_decay,
                                     c10::string_view rule, std::optional<double> scale,
                                     const OptionalTensor& initial_state, bool output_final_state,
                                     const OptionalTensor& cu_seqlens, bool qk_l2norm,
                                     bool recompute) {
  return run(kSequential, q, k, v, beta, log_decay, rule, scale, initial_state, output_final_state,
             cu_seqlens, qk_l2norm, recompute);
}

}  // namespace

TORCH_LIBRARY_IMPL(efla, CompositeImplicitAutograd, m) {
  m.impl("chunk", composite<false>);
  m.impl("recurrent", composite<true>);
}
TORCH_LIBRARY_IMPL(efla, CPU, m) {
  m.impl("_delta_rule_forward", forward_kernel);
  m.impl("_delta_rule_backward", backward_kernel);
}
#ifdef EFLA_CUDA
TORCH_LIBRARY_IMPL(efla, CUDA, m) {
  m.impl("_delta_rule_forward", forward_kernel);
  m.impl("_delta_rule_backward", backward_kernel);
}
#endif
TORCH_LIBRARY_IMPL(efla, Meta, m) {
  m.impl("_delta_rule_forward", forward_meta);
  m.impl("_delta_rule_backward", backward_meta);
}

}  // namespace efla::ops
