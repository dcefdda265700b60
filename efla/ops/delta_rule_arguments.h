// The arguments of chunk, recurrent and step_: their checks, and their translation into the plain
// pointers of efla/kernels/params.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <string_view>
#include <vector>

#include "efla/kernels/params.h"

namespace efla::ops {

/// The arguments as the user gave them. Without a token axis (step_ only) q, k are [B,H,K], v
/// [B,HV,V] and the scalars [B,HV]; T is then 1.
struct DeltaRuleArguments {
  const char* op;  // for messages
  const at::Tensor& q;
  const at::Tensor& k;
  const at::Tensor& v;
  const at::Tensor& beta;
  const std::optional<at::Tensor>& log_decay;
  std::string_view rule;
  std::optional<double> scale;
  bool qk_l2norm;
  bool has_token_axis = true;
};

/// Sizes that may be symbolic (torch.compile with dynamic shapes).
struct SymbolicShape {
  c10::SymInt batch, tokens, heads, value_heads, key_dim, value_dim;
};

/// The rule of that name. Throws, listing the rules, for an unknown name and for rk2/rk4 with
/// decay.
Rule parse_rule(const char* op, std::string_view name, bool has_decay);

/// Checks shapes, dtypes and devices of q, k, v, beta, log_decay and the rule.
SymbolicShape check_arguments(const DeltaRuleArguments& arguments);

/// Checks initial_state and cu_seqlens; returns N, the number of sequences.
c10::SymInt check_sequences(const DeltaRuleArguments& arguments, const SymbolicShape& shape,
                            const std::optional<at::Tensor>& initial_state,
                            const std::optional<at::Tensor>& cu_seqlens);

/// How a state may be stored: in the arithmetic type or, where that is float32, also in 16 bits.
enum class StateStorage { kArithmetic, kArithmeticOr16Bits };

/// Checks a tensor [rows, HV, K, V] of states.
void check_state(const char* op, const char* name, const at::Tensor& state, const char* rows_name,
                 const c10::SymInt& rows, const DeltaRuleArguments& arguments,
                 const SymbolicShape& shape, StateStorage storage = StateStorage::kArithmetic);

/// Checked arguments as kernel parameters, and the tensors that own what they point to.
struct PreparedProblem {
  Problem problem;
  at::Tensor q, k, v, beta, log_decay, initial_state;
  std::vector<int64_t> offsets;  // cu_seqlens on the CPU,
  at::Tensor device_offsets;     // or on a GPU

  bool packed() const { return problem.cu_seqlens != nullptr; }
  /// True if no token of any sequence exists, so that there is nothing to run.
  bool empty() const { return problem.shape.tokens == 0 || problem.shape.sequences == 0; }
};

/// Fills `out` (in place: the problem points into its own vector). The arguments must be checked;
/// copies only what a kernel cannot read in place. On a GPU nothing waits for the device: a kernel
/// checks the values of cu_seqlens (device_checks.h).
void prepare_problem(const DeltaRuleArguments& arguments,
                     const std::optional<at::Tensor>& initial_state,
                     const std::optional<at::Tensor>& cu_seqlens, PreparedProblem& out);

/// A slice of the arguments: tokens (dim 1) or heads (2) with their value heads, `count` from
/// `begin` on.
struct ArgumentsSlice {
  ArgumentsSlice(const DeltaRuleArguments& a, int64_t dim, int64_t begin, int64_t count);
  /// That of a tensor [B, T, H or HV, ...], or along `axis` where others have that dimension.
  at::Tensor of(const at::Tensor& t, int64_t axis) const;
  at::Tensor of(const at::Tensor& t) const { return of(t, dim); }
  /// With the rest of `a`. They refer to this slice's tensors.
  DeltaRuleArguments arguments(const DeltaRuleArguments& a) const {
    return {a.op, q, k, v, beta, log_decay, a.rule, a.scale, a.qk_l2norm};
  }

  int64_t dim, begin, count, heads;
  at::Tensor q, k, v, beta;
  std::optional<at::Tensor> log_decay;
};

/// Strides of a tensor [B, T, H, ...] (or [B, H, ...]) whose rows are contiguous.
View view_of(const at::Tensor& t, bool has_token_axis = true);
MutableView mutable_view_of(const at::Tensor& t, bool has_token_axis = true);

}  // namespace efla::ops
