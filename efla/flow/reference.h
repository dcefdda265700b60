// The sequential reference in double precision: the recurrence of step_rule.h token by token, and
// its hand-derived backward pass (docs/mathematics.md, "Gradients"). Every kernel of the project is
// tested against it. It is written to be read and trusted, not to be fast: O(T K V) per head, one
// thread.
//
// Layouts are those of the operators, row-major and contiguous:
//   q, k              [B, T, H, K]
//   v, o              [B, T, HV, V]
//   beta, log_decay   [B, T, HV]
//   state             [N, HV, K, V]     N = B, or the number of packed sequences
// HV is a multiple of H; value head i reads key head i / (HV / H).
#pragma once

#include <cstdint>
#include <vector>

#include "efla/flow/step_rule.h"

namespace efla {

/// One call of the operator. Vectors that may be empty say so.
struct ReferenceProblem {
  int64_t batch = 1;        // B; must be 1 when packed
  int64_t tokens = 0;       // T
  int64_t heads = 1;        // H
  int64_t value_heads = 1;  // HV
  int64_t key_dim = 0;      // K
  int64_t value_dim = 0;    // V

  Rule rule = Rule::kExact;
  double scale = 1.0;      // o_t = scale * S_t^T q_t
  bool qk_l2norm = false;  // q, k <- x * rsqrt(sum x^2 + 1e-6) before use

  std::vector<double> q, k;           // [B, T, H, K]
  std::vector<double> v;              // [B, T, HV, V]
  std::vector<double> beta;           // [B, T, HV], >= 0 for the exact rules
  std::vector<double> log_decay;      // [B, T, HV], <= 0; empty: no decay
  std::vector<double> initial_state;  // [N, HV, K, V]; empty: zero

  // Packed sequences: offsets [N + 1] into T, non-decreasing. Empty: dense, sequence b is row b.
  // Rows outside [cu_seqlens.front(), cu_seqlens.back()) give o = 0 and zero gradients, whatever
  // they hold.
  std::vector<int64_t> cu_seqlens;

  /// N, the number of sequences and of states.
  int64_t sequences() const {
    return cu_seqlens.empty() ? batch : static_cast<int64_t>(cu_seqlens.size()) - 1;
  }
};

struct ReferenceResult {
  std::vector<double> o;            // [B, T, HV, V]
  std::vector<double> final_state;  // [N, HV, K, V]
};

/// Gradients of a scalar loss with respect to every input; shapes of the inputs.
struct ReferenceGradients {
  std::vector<double> q, k, v, beta;
  std::vector<double> log_decay;      // zero-filled [B, T, HV] even if the problem has no decay
  std::vector<double> initial_state;  // [N, HV, K, V] even if the problem's is empty
};

/// Outputs of the recurrence. Throws std::invalid_argument naming the vector whose size is wrong.
ReferenceResult reference_forward(const ReferenceProblem& problem);

/// Gradients of the loss whose gradients with respect to the outputs are `grad_o` [B, T, HV, V] and
/// `grad_final_state` [N, HV, K, V]; either may be empty, meaning zero. Keeps one state in 64 and
/// recomputes the others.
ReferenceGradients reference_backward(const ReferenceProblem& problem,
                                      const std::vector<double>& grad_o,
                                      const std::vector<double>& grad_final_state = {});

}  // namespace efla
