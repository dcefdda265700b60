// Held-out loss of a language model, by two conventions that give different numbers and are
// therefore always named:
//
//   stateful    each document is read once from its beginning to its end, so every token is
//               predicted from the whole document before it (the recurrent state is carried).
//   windows-L   lm-evaluation-harness's rolling log-likelihood with max_length = L: the first
//               window predicts up to L tokens after one prefix token; later ones start from an
//               empty state with one token of context and predict the next L. The last window of a
//               longer document reaches back to be L tokens long and predicts only what is left.
//
// Both predict every token of a document once; the first one after BOS (or EOS). With a tokenizer
// that has neither, the first token costs log(vocab), the code length of a uniform guess.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "efla/eval/text_documents.h"
#include "efla/nn/language_model.h"

namespace efla {

struct PerplexityOptions {
  int64_t batch_tokens = 8192;  // tokens of one forward call; changes speed and memory only
  std::function<void(int64_t done, int64_t total)> progress;  // tokens; may be empty
};

struct Perplexity {
  std::string metric;  // "stateful" or "windows-L"
  double nll = 0;      // sum of -log p over all tokens, natural logarithm
  int64_t tokens = 0, words = 0, bytes = 0, documents = 0;

  double token_perplexity() const;  // exp(nll / tokens)
  double word_perplexity() const;   // exp(nll / words)
  double byte_perplexity() const;   // exp(nll / bytes)
  double bits_per_byte() const;     // nll / bytes / ln 2
};

/// Metric "stateful". Documents of similar length are read side by side. Throws Error naming the
/// first token outside the model's vocabulary, or when there are no tokens.
Perplexity stateful_perplexity(LanguageModel model, const EvalData& data,
                               const PerplexityOptions& options = {});

/// Metric "windows-L" with L = window >= 1. Errors as above; UsageError for a window below 1.
Perplexity windowed_perplexity(LanguageModel model, const EvalData& data, int64_t window,
                               const PerplexityOptions& options = {});

/// One window: inputs are tokens[begin, begin + length) of the document, where token -1 is the
/// prefix; the last `scored` of their successors are predicted.
struct Window {
  int64_t document = 0;
  int64_t begin = -1;
  int64_t length = 0;
  int64_t scored = 0;
};

/// The windows of documents with the given token counts, in order.
std::vector<Window> rolling_windows(const std::vector<int64_t>& token_counts, int64_t window);

}  // namespace efla
