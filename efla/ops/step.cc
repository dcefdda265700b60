// efla::step_: one or a few tokens per sequence against a pool of states, in place, without
// gradient. Everything is checked before the first state changes.
#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <utility>

#include "efla/kernels/cpu/delta_rule.h"
#include "efla/ops/cuda_kernels.h"
#include "efla/ops/delta_rule_arguments.h"
#include "efla/ops/device_checks.h"
#include "efla/ops/executor.h"
#include "efla/ops/tensors.h"

namespace efla::ops {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;

constexpr const char* kOp = "efla::step_";

void check_step(const DeltaRuleArguments& a, const Tensor& state,
                const OptionalTensor& state_indices) {
  TORCH_CHECK(a.q.dim() == 3 || a.q.dim() == 4, kOp,
              ": q must have shape [B, H, K] or [B, T, H, K], but has shape ", a.q.sym_sizes());
  const SymbolicShape s = check_arguments(a);
  TORCH_CHECK(s.tokens <= kMaxStepTokens, kOp, ": takes at most ", kMaxStepTokens,
              " tokens per sequence, but q has T = ", s.tokens, " (shape ", a.q.sym_sizes(),
              "); use efla.recurrent or efla.chunk");
  const Tensor* indices = given(state_indices);
  if (indices == nullptr) {
    check_state(kOp, "state", state, "B (without state_indices)", s.batch, a, s,
                StateStorage::kArithmeticOr16Bits);
    return;
  }
  TORCH_CHECK(state.dim() == 4, kOp, ": state must have shape [P, HV, K, V], but has shape ",
              state.sym_sizes());
  check_state(kOp, "state", state, "P", state.sym_size(0), a, s, StateStorage::kArithmeticOr16Bits);
  check_device(kOp, a.q, "state_indices", *indices);
  TORCH_CHECK(indices->scalar_type() == at::kInt || indices->scalar_type() == at::kLong, kOp,
              ": state_indices must be int32 or int64, but is ", indices->scalar_type(),
              " with shape ", indices->sym_sizes());
  TORCH_CHECK(indices->dim() == 1 && indices->sym_size(0) == s.batch, kOp,
              ": state_indices must have shape [B] = [", s.batch, "], but has shape ",
              indices->sym_sizes());
}

// In range, and no state named twice: two rows would race for it.
std::vector<int64_t> read_indices(const Tensor& indices, int64_t pool_size) {
  const Tensor wide = contiguous(indices, at::kLong);
  const int64_t* data = wide.const_data_ptr<int64_t>();
  std::vector<int64_t> out(data, data + wide.numel());
  for (size_t i = 0; i < out.size(); ++i) {
    TORCH_CHECK(out[i] >= -1 && out[i] < pool_size, kOp, ": state_indices[", i, "] = ", out[i],
                " is outside the pool of P = ", pool_size, " states (-1 marks a padding row)");
  }
  std::vector<int64_t> sorted = out;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 1; i < sorted.size(); ++i) {
    TORCH_CHECK(sorted[i] == -1 || sorted[i] != sorted[i - 1], kOp, ": state_indices names state ",
                sorted[i], " more than once; each row needs a state of its own");
  }
  return out;
}

// True if no two elements share memory, seen from the strides: from the smallest on, each must step
// over all that the smaller ones reach. (A few interleaved layouts without overlap fail this too.)
bool elements_are_apart(const Tensor& t) {
  if (t.is_non_overlapping_and_dense() || t.numel() == 0) return true;
  std::array<std::pair<int64_t, int64_t>, 4> axes;  // (stride, size), t is [P, HV, K, V]
  for (int64_t i = 0; i < 4; ++i) axes[i] = {t.stride(i), t.size(i)};
  std::sort(axes.begin(), axes.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : axes) {
    if (size == 1) continue;
    if (stride <= reach) return false;
    reach += stride * (size - 1);
  }
  return true;
}

void check_state_memory(const DeltaRuleArguments& a, const Tensor& state) {
  TORCH_CHECK(elements_are_apart(state), kOp,
              ": elements of state share memory or may do so (shape ", state.sizes(), ", strides ",
              state.strides(), "), so that it cannot be updated in place; pass state.clone()");
  const std::pair<const char*, const Tensor*> inputs[] = {
      {"q", &a.q}, {"k", &a.k}, {"v", &a.v}, {"beta", &a.beta}, {"log_decay", given(a.log_decay)}};
  for (const auto& [name, t] : inputs) {
    if (t == nullptr) continue;
    const auto overlap = at::get_overlap_status(state, *t);
    TORCH_CHECK(overlap != at::MemOverlapStatus::Full && overlap != at::MemOverlapStatus::Partial,
                kOp, ": ", name,
                " shares memory with state, which is updated in place; pass a copy");
  }
}

Tensor step_kernel(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                   Tensor& state, const OptionalTensor& log_decay, c10::string_view rule,
                   std::optional<double> scale, const OptionalTensor& state_indices,
                   bool qk_l2norm) {
  const bool has_token_axis = q.dim() != 3;
  const DeltaRuleArguments a{kOp, q, k, v, beta, log_decay, rule, scale, qk_l2norm, has_token_axis};
  check_step(a, state, state_indices);
  check_state_memory(a, state);
  throw_pending_error(q);
  const bool cuda = q.is_cuda();
  std::vector<int64_t> indices;
  Tensor device_indices;  // on a GPU, where their values are looked at in debug mode only
  if (const Tensor* t = given(state_indices)) {
    if (cuda) {
      if (debug_checks()) read_indices(t->cpu(), state.size(0));
      device_indices = contiguous(*t, at::kLong);
    } else {
      indices = read_indices(*t, state.size(0));
    }
  }

  PreparedProblem prepared;
  prepare_problem(a, {}, {}, prepared);
  // Not through the dispatcher: an allocation that way costs a third of a small step.
  Tensor o = cuda ? at::empty(v.sizes(), prepared.v.options())
                  : at::detail::empty_cpu(v.sizes(), prepared.v.options());
  if (o.numel() == 0) return as_dtype(o, q.scalar_type());

  // A state with other strides, or in a dtype that the kernel has not, is updated through a copy;
  // the caller's memory changes all the same.
  Tensor pool = contiguous(state, storage_type(state));
  StepParams params;
  params.problem = prepared.problem;
  params.o = mutable_view_of(o, has_token_axis);
  params.state = pool.mutable_data_ptr();
  params.state_dtype = kernel_dtype(pool.scalar_type());
  params.pool_size = pool.size(0);
  if (given(state_indices)) {
    params.state_indices = cuda ? device_indices.const_data_ptr<int64_t>() : indices.data();
  }
  cuda ? cuda_step(a, params) : cpu::step(params, torch_executor());
  if (!pool.is_same(state)) state.copy_(pool);
  return as_dtype(o, q.scalar_type());
}

Tensor step_meta(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                 Tensor& state, const OptionalTensor& log_decay, c10::string_view rule,
                 std::optional<double> scale, const OptionalTensor& state_indices, bool qk_l2norm) {
  const DeltaRuleArguments a{kOp, q, k, v, beta, log_decay, rule, scale, qk_l2norm, q.dim() != 3};
  check_step(a, state, state_indices);
  return at::empty_symint(v.sym_sizes(), v.options());
}

const c10::TypedOperatorHandle<decltype(step_kernel)>& step_operator() {
  static const auto op = find_operator<decltype(step_kernel)>("efla::step_");
  return op;
}

// No gradient flows through an in-place step, so asking for one is an error and not a silent zero.
Tensor step_autograd(c10::DispatchKeySet keys, const Tensor& q, const Tensor& k, const Tensor& v,
                     const Tensor& beta, Tensor& state, const OptionalTensor& log_decay,
                     c10::string_view rule, std::optional<double> scale,
                     const OptionalTensor& state_indices, bool qk_l2norm) {
  const std::pair<const char*, const Tensor*> inputs[] = {{"q", &q},
                                                          {"k", &k},
                                                          {"v", &v},
                                                          {"beta", &beta},
                                                          {"state", &state},
                                                          {"log_decay", given(log_decay)},
                                                          {"state_indices", given(state_indices)}};
  const bool recording = at::GradMode::is_enabled();
  for (const auto& [name, t] : inputs) {
    if (t == nullptr) continue;
    check_device(kOp, q, name, *t);
    check_no_tangent(kOp, *t);
    TORCH_CHECK(!recording || !t->requires_grad(), kOp, ": has no gradient, but ", name,
                " requires one (shape ", t->sym_sizes(),
                "); call it under torch.no_grad(), or use efla.recurrent");
  }
  return step_operator().redispatch(keys & c10::after_autograd_keyset, q, k, v, beta, state,
                                    log_decay, rule, scale, state_indices, qk_l2norm);
}

// Tells autograd that `state` changed, so that a graph that saved it notices.
Tensor step_inplace(c10::DispatchKeySet keys, const Tensor& q, const Tensor& k, const Tensor& v,
                    const Tensor& beta, Tensor& state, const OptionalTensor& log_decay,
                    c10::string_view rule, std::optional<double> scale,
                    const OptionalTensor& state_indices, bool qk_l2norm) {
  // increment_version() would refuse it as well, but only after the state has changed.
  TORCH_CHECK(!state.is_inference() || c10::InferenceMode::is_enabled(), kOp,
              ": state was made under torch.inference_mode() (shape ", state.sym_sizes(),
              ") and can be updated in place only there; call step_ under it too, or pass "
              "state.clone()");
  Tensor o = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return step_operator().redispatch(keys & c10::after_ADInplaceOrView_keyset, q, k, v, beta,
                                      state, log_decay, rule, scale, state_indices, qk_l2norm);
  }();
  torch::autograd::increment_version(state);
  return o;
}

}  // namespace

TORCH_LIBRARY_IMPL(efla, CPU, m) { m.impl("step_", step_kernel); }
#ifdef EFLA_CUDA
TORCH_LIBRARY_IMPL(efla, CUDA, m) { m.impl("step_", step_kernel); }
#endif
TORCH_LIBRARY_IMPL(efla, Meta, m) { m.impl("step_", step_meta); }
TORCH_LIBRARY_IMPL(efla, Autograd, m) { m.impl("step_", step_autograd); }
TORCH_LIBRARY_IMPL(efla, ADInplaceOrView, m) { m.impl("step_", step_inplace); }

}  // namespace efla::ops
