// Held-out loss inside the training loop.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <numbers>
#include <optional>

#include "efla/io/dataset.h"
#include "efla/nn/language_model.h"

namespace efla {

struct HeldOutLoss {
  double nll = 0;            // sum over targets, nats
  int64_t targets = 0;       // tokens predicted
  bool whole = false;        // every row of the data was read
  int64_t source_bytes = 0;  // of the text that the data stand for

  double per_token() const { return nll / static_cast<double>(targets); }
  /// Only meaningful when `whole`.
  double bits_per_byte() const {
    return nll / std::numbers::ln2 / static_cast<double>(source_bytes);
  }
};

/// Loss over the rows of `data` in file order, up to `max_tokens` tokens (0: all), `rows` rows at a
/// time. The state starts afresh at each row and document, as in training. Nothing when `stop`
/// became true on the way.
std::optional<HeldOutLoss> held_out_loss(LanguageModel& model, const TokenDataset& data,
                                         int64_t rows, int64_t max_tokens,
                                         const std::function<bool()>& stop);

}  // namespace efla
