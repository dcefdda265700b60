// Reading tokens one after the other with the recurrent cache.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <span>
#include <vector>

#include "efla/nn/language_model.h"

namespace efla {

/// One sequence in the course of decoding: the model's cache and the prediction of the next token.
/// Memory and time per token do not grow with the length. Copies are independent branches.
class Decoding {
 public:
  explicit Decoding(LanguageModel model);

  /// Reads tokens (at least one, each in [0, vocab)); long inputs are read in pieces of bounded
  /// memory. Throws Error naming the first token outside the vocabulary, before anything is read.
  void read(std::span<const int32_t> tokens);

  /// Logits of the token that comes next, [vocab] float32; valid after the first read().
  std::span<const float> logits() const { return logits_; }

  int64_t tokens_read() const { return cache_.tokens_seen; }
  /// Bytes of the state that is carried from token to token.
  int64_t state_bytes() const;

 private:
  LanguageModel model_;
  Cache cache_;
  std::vector<float> logits_;
};

}  // namespace efla
