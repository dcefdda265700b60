// Next-token cross entropy over a vocabulary, in float32 and in blocks of tokens.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace efla {

/// A target that takes no part in the loss.
inline constexpr int64_t kIgnoreTarget = -100;

/// A loss that adds up over batches: divide the sums, not the means.
struct LossSum {
  at::Tensor nll;  // scalar: sum of -log p(target), natural logarithm; float32 (float64 model: 64)
  int64_t count = 0;  // targets that were not ignored
};

/// Loss of logits = hidden . head_weight^T against targets [...] int64. The logits are never held
/// as a whole: one block of tokens at a time, its gradient formed at once. hidden [..., D],
/// head_weight [vocab, D]. Differentiable once.
LossSum linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& head_weight,
                             const at::Tensor& targets);

/// -log p(target) for every position, shape of targets, 0 where ignored. No gradient.
at::Tensor token_nll(const at::Tensor& hidden, const at::Tensor& head_weight,
                     const at::Tensor& targets);

}  // namespace efla
