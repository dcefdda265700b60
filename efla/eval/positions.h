// How the loss changes along a long text whose state is carried from its beginning.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "efla/eval/perplexity.h"

namespace efla {

/// The tokens at positions [begin, end) of all segments.
struct PositionRange {
  int64_t begin = 0, end = 0;
  double loss = 0;              // mean nll of a token
  std::optional<double> error;  // standard error over segments; none for a single one
};

struct PositionLoss {
  int64_t length = 0, segments = 0;
  std::vector<PositionRange> ranges;  // [0, 64), [64, 128), [128, 256), ... up to `length`
};

/// Documents are cut into segments of `length` tokens, each read once from an empty state, without
/// a break; what is left of a document is not used, so every range averages over the same segments.
/// Throws UsageError when no document is long enough, Error as the functions of perplexity.h.
PositionLoss position_loss(LanguageModel model, const EvalData& data, int64_t length,
                           const PerplexityOptions& options = {});

}  // namespace efla
