// The delta-rule family on the CPU, for every step rule (efla/flow/step_rule.h): chunkwise forward
// and backward for whole sequences, the token-by-token recurrence, and the in-place step.
// Equations: docs/mathematics.md, "Chunkwise form". Instruction sets are chosen at run time.
//
// Preconditions of all of them, checked by the caller: 0 < K, V <= kMaxHeadDim, T <= kMaxStepTokens
// for step, HV a multiple of H > 0, dtype not kFloat16 (the program ends), no null view but where
// params.h allows one, cu_seqlens as described there.
#pragma once

#include "efla/kernels/params.h"

namespace efla::cpu {

/// Chunkwise forward. Bitwise the same for any executor.threads.
void chunk_forward(const ForwardParams& params, const Executor& executor);

/// Chunkwise backward. Bitwise deterministic for a given executor.threads.
void chunk_backward(const BackwardParams& params, const Executor& executor);

/// Token by token; the same function as chunk_forward. params.checkpoints is honoured, so
/// chunk_backward serves both. Bitwise the same for any executor.threads.
void recurrent_forward(const ForwardParams& params, const Executor& executor);

/// In-place step on a pool of states, stored in the arithmetic type or, where that is float, as
/// kBFloat16. state_indices must be in [-1, P) and, apart from -1, distinct (checked by the
/// caller).
void step(const StepParams& params, const Executor& executor);

}  // namespace efla::cpu
