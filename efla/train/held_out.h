// Held-out loss inside the training loop.
//
// Convention "rows-LENGTH": the documents in file order are cut into rows of LENGTH tokens, and the
// state starts afresh at each row and document, as in training. Every token but the first of a
// document is predicted. `efla eval` has the conventions that carry the state on, which give lower
// losses: compare only numbers of one name.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <numbers>
#include <optional>
#include <string>

#include "efla/io/dataset.h"
#include "efla/io/tokenizer.h"
#include "efla/nn/language_model.h"

namespace efla {

struct HeldOutLoss {
  double nll = 0;       // sum over targets, nats
  int64_t targets = 0;  // tokens predicted
  int64_t bytes = 0;    // of the text that the targets stand for, exactly
  int64_t length = 0;   // tokens in a row

  double per_token() const { return nll / static_cast<double>(targets); }
  double bits_per_byte() const { return nll / std::numbers::ln2 / static_cast<double>(bytes); }
  std::string convention() const { return "rows-" + std::to_string(length); }
};

/// Loss over the rows of `data` in file order, up to `max_tokens` tokens rounded up to whole rows
/// (0: all), `rows` rows at a time. The bytes are the data's recorded ones when all rows are read,
/// else those that `tokenizer` decodes the targets to. Nothing when `stop` became true on the way.
std::optional<HeldOutLoss> held_out_loss(LanguageModel& model, const TokenDataset& data,
                                         const Tokenizer& tokenizer, int64_t rows,
                                         int64_t max_tokens, const std::function<bool()>& stop);

}  // namespace efla
