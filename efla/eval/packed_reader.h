// Many sequences read in one packed call of the model, and what it predicts at chosen places.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "efla/nn/language_model.h"

namespace efla {

struct Likelihood;

/// Collects sequences and the predictions wanted of them, then reads them. No padding between
/// sequences. Matrix products see a multiple of 64 rows and 128 or more: their kernels add up a
/// row's products in another order when there are few rows, and a result may not depend on what
/// else is in its batch.
class PackedReader {
 public:
  explicit PackedReader(LanguageModel model);

  void begin_sequence() { offsets_.push_back(static_cast<int64_t>(tokens_.size())); }
  void append(int32_t token) { tokens_.push_back(token); }
  /// Adds to `result` the log-probability of `token` after the token that stands `back` places from
  /// the end of what was appended so far (1: after the last).
  void want(int64_t back, int32_t token, Likelihood* result) {
    wanted_.push_back({static_cast<int64_t>(tokens_.size()) - back, token, result});
  }

  /// Reads everything since the last call. A cache that holds states goes on from them, one for
  /// each sequence; an empty one receives them; nullptr: the states are not kept.
  void read(Cache* cache);

  /// Sequences whose states fit into the memory set aside for them.
  int64_t max_rows() const { return max_rows_; }
  int64_t tokens_read() const { return tokens_read_; }

 private:
  struct Wanted {
    int64_t position;  // in the packed tokens
    int32_t token;
    Likelihood* result;
  };

  at::Tensor read_all(Cache* cache);
  void read_piecewise(Cache* cache);
  // Predictions of wanted_[first, last), whose positions count from `begin` in hidden [1, T, D].
  void predict(const at::Tensor& hidden, int64_t begin, size_t first, size_t last);

  LanguageModel model_;
  at::Device device_;
  int64_t max_rows_ = 1;
  int64_t tokens_read_ = 0;
  std::vector<int64_t> tokens_, offsets_;
  std::vector<Wanted> wanted_;
};

}  // namespace efla
