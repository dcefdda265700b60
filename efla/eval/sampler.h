// Choosing the next token from logits: penalties, temperature, top-k, top-p, then one draw. Works
// on plain floats and knows nothing of models. The definitions are those of transformers' logits
// processors, applied in its order, so that settings found elsewhere mean the same here.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace efla {

struct SamplingOptions {
  double temperature = 1.0;         // logits are divided by it; 0 = greedy (the highest logit)
  int64_t top_k = 0;                // keep the k highest logits (and ties of the k-th); 0 = all
  double top_p = 1.0;               // keep the fewest tokens whose probabilities reach p
  double repetition_penalty = 1.0;  // > 1 makes tokens seen before less likely
  uint64_t seed = 0;

  /// Throws UsageError naming the first value that makes no sense.
  void validate() const;
};

/// A token that may be drawn.
struct Candidate {
  int32_t token = 0;
  double probability = 0;
};

/// The source of one text: options, random state and the set of tokens seen so far. Memory is
/// proportional to the vocabulary, whatever the length of the text.
class Sampler {
 public:
  /// Texts of equal (seed, stream) draw the same numbers; streams of one seed are independent.
  explicit Sampler(const SamplingOptions& options, uint64_t stream = 0);

  /// Marks a token as seen (of the prompt or drawn) for the repetition penalty.
  void observe(int32_t token);

  /// Draws a token from logits [vocab] and observes it. Throws Error when a logit is NaN or all are
  /// -infinity.
  int32_t sample(std::span<const float> logits);

  /// What sample() draws from: the tokens left after penalty, temperature, top-k and top-p with
  /// their probabilities (sum 1), most likely first, equals by token id.
  std::vector<Candidate> distribution(std::span<const float> logits) const;

 private:
  // In order of token id when all tokens may be drawn (sorting a whole vocabulary costs more than a
  // small model), else as distribution().
  std::vector<Candidate> drawing_order(std::span<const float> logits) const;
  std::vector<double> penalized(std::span<const float> logits) const;

  SamplingOptions options_;
  std::mt19937_64 random_;
  std::vector<int32_t> seen_;  // distinct tokens, in order of first appearance
  std::vector<bool> is_seen_;  // by token id; grows to the largest id seen
};

}  // namespace efla
