#include "efla/ops/delta_rule_arguments.h"

#include <cfloat>
#include <cmath>
#include <string>
#include <utility>

#include "efla/ops/device_checks.h"
#include "efla/ops/tensors.h"

namespace efla::ops {
namespace {

std::string rule_list() {
  std::string names;
  for (const Rule rule : kAllRules)
    names += std::string(names.empty() ? "" : ", ") + rule_name(rule);
  return names;
}

// The kernels multiply by scale in the arithmetic type.
void check_scale(const DeltaRuleArguments& a) {
  if (!a.scale) return;
  const bool wide = a.q.scalar_type() == at::kDouble;
  TORCH_CHECK(std::abs(*a.scale) <= (wide ? DBL_MAX : FLT_MAX), a.op,
              ": scale must be finite in the arithmetic of q, ", wide ? "float64" : "float32",
              ", but is ", *a.scale);
}

void check_query_and_value(const DeltaRuleArguments& a) {
  const int64_t dim = a.has_token_axis ? 4 : 3;
  const char* q_layout = a.has_token_axis ? "[B, T, H, K]" : "[B, H, K]";
  const char* v_layout = a.has_token_axis ? "[B, T, HV, V]" : "[B, HV, V]";
  TORCH_CHECK(is_supported(a.q.scalar_type()), a.op,
              ": q must be float32, float64, bfloat16 or float16, but is ", a.q.scalar_type(),
              " with shape ", a.q.sym_sizes());
  TORCH_CHECK(a.q.dim() == dim, a.op, ": q must have shape ", q_layout, ", but has shape ",
              a.q.sym_sizes());
  TORCH_CHECK(a.k.dim() == dim && a.k.sym_sizes() == a.q.sym_sizes(), a.op,
              ": k must have the shape of q, ", a.q.sym_sizes(), ", but has shape ",
              a.k.sym_sizes());
  TORCH_CHECK(a.v.dim() == dim, a.op, ": v must have shape ", v_layout, ", but has shape ",
              a.v.sym_sizes());
  bool same = a.v.sym_size(0) == a.q.sym_size(0);
  if (a.has_token_axis) same = same && a.v.sym_size(1) == a.q.sym_size(1);
  TORCH_CHECK(same, a.op, ": v must have shape ", v_layout, " with B and T of q, but v has shape ",
              a.v.sym_sizes(), " and q ", a.q.sym_sizes());
  for (const auto& [name, t] : {std::pair<const char*, const at::Tensor&>{"k", a.k}, {"v", a.v}}) {
    TORCH_CHECK(t.scalar_type() == a.q.scalar_type(), a.op, ": ", name,
                " must have the dtype of q, ", a.q.scalar_type(), ", but is ", t.scalar_type(),
                " (", name, " has shape ", t.sym_sizes(), ", q ", a.q.sym_sizes(), ")");
  }
}

void check_head_counts(const DeltaRuleArguments& a, const SymbolicShape& s) {
  TORCH_CHECK(s.heads >= 1 && s.key_dim >= 1, a.op,
              ": q must have H >= 1 and K >= 1, but has shape ", a.q.sym_sizes());
  TORCH_CHECK(s.value_heads >= 1 && s.value_dim >= 1, a.op,
              ": v must have HV >= 1 and V >= 1, but has shape ", a.v.sym_sizes());
  TORCH_CHECK(s.key_dim <= kMaxHeadDim, a.op, ": q has K = ", s.key_dim, ", but K may be at most ",
              kMaxHeadDim, " (q has shape ", a.q.sym_sizes(), ")");
  TORCH_CHECK(s.value_dim <= kMaxHeadDim, a.op, ": v has V = ", s.value_dim,
              ", but V may be at most ", kMaxHeadDim, " (v has shape ", a.v.sym_sizes(), ")");
  TORCH_CHECK(s.value_heads % s.heads == 0, a.op, ": v has HV = ", s.value_heads,
              " heads, which must be a multiple of the H = ", s.heads, " heads of q (v has shape ",
              a.v.sym_sizes(), ", q ", a.q.sym_sizes(), ")");
}

void check_scalar_per_head(const DeltaRuleArguments& a, const char* name, const at::Tensor& t) {
  const int64_t axes = a.has_token_axis ? 3 : 2;
  TORCH_CHECK(t.dim() == axes && t.sym_sizes() == a.v.sym_sizes().slice(0, axes), a.op, ": ", name,
              " must have shape ",
              a.has_token_axis ? "[B, T, HV] = " : "[B, HV] = ", a.v.sym_sizes().slice(0, axes),
              ", but has shape ", t.sym_sizes(), " (v has shape ", a.v.sym_sizes(), ")");
  TORCH_CHECK(t.scalar_type() == at::kFloat || t.scalar_type() == a.q.scalar_type(), a.op, ": ",
              name, " must be float32 or have the dtype of q, ", a.q.scalar_type(), ", but is ",
              t.scalar_type(), " with shape ", t.sym_sizes());
}

}  // namespace

Rule parse_rule(const char* op, std::string_view name, bool has_decay) {
  const std::optional<Rule> rule = rule_from_name(name);
  TORCH_CHECK(rule, op, ": unknown rule \"", name, "\"; rules are ", rule_list());
  TORCH_CHECK(!has_decay || (rule != Rule::kRk2 && rule != Rule::kRk4), op, ": rule \"", name,
              "\" has no form with log_decay; leave log_decay out or use linear, euler, exact or "
              "exact_log");
  return *rule;
}

SymbolicShape check_arguments(const DeltaRuleArguments& a) {
  const at::Tensor* log_decay = given(a.log_decay);
  check_device(a.op, a.q, "q", a.q);
  check_device(a.op, a.q, "k", a.k);
  check_device(a.op, a.q, "v", a.v);
  check_device(a.op, a.q, "beta", a.beta);
  if (log_decay != nullptr) check_device(a.op, a.q, "log_decay", *log_decay);
  parse_rule(a.op, a.rule, log_decay != nullptr);
  check_scale(a);

  check_query_and_value(a);
  const int64_t head_axis = a.has_token_axis ? 2 : 1;
  const SymbolicShape s{a.q.sym_size(0),
                        a.has_token_axis ? a.q.sym_size(1) : c10::SymInt(1),
                        a.q.sym_size(head_axis),
                        a.v.sym_size(head_axis),
                        a.q.sym_size(head_axis + 1),
                        a.v.sym_size(head_axis + 1)};
  check_head_counts(a, s);
  check_scalar_per_head(a, "beta", a.beta);
  if (log_decay != nullptr) check_scalar_per_head(a, "log_decay", *log_decay);
  return s;
}

void check_state(const char* op, const char* name, const at::Tensor& state, const char* rows_name,
                 const c10::SymInt& rows, const DeltaRuleArguments& a, const SymbolicShape& s,
                 StateStorage storage) {
  check_device(op, a.q, name, state);
  const at::ScalarType dtype = arithmetic_type(a.q.scalar_type());
  const bool may_be_16_bits = storage == StateStorage::kArithmeticOr16Bits && dtype == at::kFloat;
  const bool is_16_bits = state.scalar_type() == at::kBFloat16 || state.scalar_type() == at::kHalf;
  TORCH_CHECK(state.scalar_type() == dtype || (may_be_16_bits && is_16_bits), op, ": ", name,
              " must be ", dtype, may_be_16_bits ? ", BFloat16 or Half" : "", " for ",
              a.q.scalar_type(), " q, but is ", state.scalar_type(), " with shape ",
              state.sym_sizes());
  TORCH_CHECK(state.dim() == 4 && state.sym_size(0) == rows && state.sym_size(1) == s.value_heads &&
                  state.sym_size(2) == s.key_dim && state.sym_size(3) == s.value_dim,
              op, ": ", name, " must have shape [", rows_name, ", HV, K, V] = [", rows, ", ",
              s.value_heads, ", ", s.key_dim, ", ", s.value_dim, "], but has shape ",
              state.sym_sizes(), " (q has shape ", a.q.sym_sizes(), ", v ", a.v.sym_sizes(), ")");
}

c10::SymInt check_sequences(const DeltaRuleArguments& a, const SymbolicShape& s,
                            const std::optional<at::Tensor>& initial_state,
                            const std::optional<at::Tensor>& cu_seqlens) {
  c10::SymInt sequences = s.batch;
  if (const at::Tensor* offsets = given(cu_seqlens)) {
    check_device(a.op, a.q, "cu_seqlens", *offsets);
    check_cu_seqlens(a.op, *offsets, a.q, "q");
    sequences = offsets->sym_size(0) - 1;
  }
  if (const at::Tensor* state = given(initial_state)) {
    check_state(a.op, "initial_state", *state, "N", sequences, a, s);
  }
  return sequences;
}

ArgumentsSlice::ArgumentsSlice(const DeltaRuleArguments& a, int64_t dim, int64_t begin,
                               int64_t count)
    : dim(dim), begin(begin), count(count), heads(a.q.size(2)) {
  q = of(a.q), k = of(a.k), v = of(a.v), beta = of(a.beta);
  if (given(a.log_decay)) log_decay = of(*a.log_decay);
}

at::Tensor ArgumentsSlice::of(const at::Tensor& t, int64_t axis) const {
  const int64_t times = dim == 2 ? t.size(axis) / heads : 1;  // value heads of a head
  return t.narrow(axis, begin * times, count * times);
}

// const_data_ptr: reading an input must not unshare copy-on-write storage.
View view_of(const at::Tensor& t, bool has_token_axis) {
  const auto s = t.strides();
  return {t.const_data_ptr(), s[0], has_token_axis ? s[1] : 0, s[has_token_axis ? 2 : 1]};
}

MutableView mutable_view_of(const at::Tensor& t, bool has_token_axis) {
  const View v = view_of(t, has_token_axis);
  return {t.mutable_data_ptr(), v.batch, v.token, v.head};
}

void prepare_problem(const DeltaRuleArguments& a, const std::optional<at::Tensor>& initial_state,
                     const std::optional<at::Tensor>& cu_seqlens, PreparedProblem& out) {
  const bool cuda = a.q.is_cuda();
  const at::ScalarType storage = cuda ? a.q.scalar_type() : storage_type(a.q.scalar_type());
  const at::ScalarType arithmetic = arithmetic_type(a.q.scalar_type());
  const bool axis = a.has_token_axis;
  const int64_t head_axis = axis ? 2 : 1;
  Problem& p = out.problem;

  out.q = with_readable_rows(as_dtype(a.q, storage));
  out.k = with_readable_rows(as_dtype(a.k, storage));
  out.v = with_readable_rows(as_dtype(a.v, storage));
  out.beta = as_dtype(a.beta, arithmetic);
  p.q = view_of(out.q, axis);
  p.k = view_of(out.k, axis);
  p.v = view_of(out.v, axis);
  p.beta = view_of(out.beta, axis);
  const at::Tensor* log_decay = given(a.log_decay);
  if (log_decay != nullptr) {
    out.log_decay = as_dtype(*log_decay, arithmetic);
    p.log_decay = view_of(out.log_decay, axis);
  }

  p.shape.batch = a.q.size(0);
  p.shape.tokens = axis ? a.q.size(1) : 1;
  p.shape.heads = a.q.size(head_axis);
  p.shape.value_heads = a.v.size(head_axis);
  p.shape.key_dim = a.q.size(head_axis + 1);
  p.shape.value_dim = a.v.size(head_axis + 1);
  p.shape.sequences = p.shape.batch;
  p.dtype = kernel_dtype(storage);
  p.rule = parse_rule(a.op, a.rule, log_decay != nullptr);
  p.scale = a.scale ? *a.scale : 1.0 / std::sqrt(static_cast<double>(p.shape.key_dim));
  p.qk_l2norm = a.qk_l2norm;

  if (const at::Tensor* offsets = given(cu_seqlens)) {
    if (cuda) {
      out.device_offsets = checked_offsets(a.op, *offsets, p.shape.tokens);
      p.cu_seqlens = out.device_offsets.const_data_ptr<int64_t>();
      p.longest_first = p.cu_seqlens + offsets->size(0);
    } else {
      out.offsets = read_offsets(a.op, *offsets, p.shape.tokens);
      p.cu_seqlens = out.offsets.data();
    }
    p.shape.sequences = offsets->size(0) - 1;
  }
  if (const at::Tensor* state = given(initial_state)) {
    out.initial_state = with_readable_rows(contiguous(*state, arithmetic));
    p.initial_state = out.initial_state.const_data_ptr();
  }
}

}  // namespace efla::ops
