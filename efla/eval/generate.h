// Text from a model: prompt in, sampled continuation out as it comes.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "efla/eval/decoding.h"
#include "efla/eval/sampler.h"
#include "efla/io/tokenizer.h"
#include "efla/nn/language_model.h"

namespace efla {

struct GenerateOptions {
  SamplingOptions sampling;
  int64_t max_tokens = 200;
  std::vector<std::string> stop;  // a text ends before the first of these
  bool ignore_eos = false;        // the end-of-text token is never drawn

  /// Throws UsageError naming the first value that makes no sense.
  void validate() const;
};

enum class StopReason { kEndOfText, kStopString, kMaxTokens };

/// "end of text", "stop string" or "max tokens".
std::string to_string(StopReason reason);

struct Generation {
  std::string text;             // without prompt and stop string; valid UTF-8
  std::vector<int32_t> tokens;  // every token drawn, the end-of-text token included
  StopReason reason = StopReason::kMaxTokens;
  double seconds = 0;  // from the first draw to the last, the prompt not included
};

/// Reads one prompt and continues it any number of times.
class Generator {
 public:
  /// The tokenizer must outlive the generator. Throws UsageError when it has more tokens than the
  /// model, for then it is not the model's.
  Generator(LanguageModel model, const Tokenizer& tokenizer);

  /// Reads the prompt (BOS is put before it when the tokenizer has one; EOS when it only has that).
  /// Throws Error for invalid UTF-8 and UsageError for an empty prompt that nothing precedes.
  void read_prompt(std::string_view prompt);

  /// One continuation. Equal prompt, options and `sample` give the same text, however many samples
  /// are taken. `on_text` (may be empty) receives the text in whole characters as it comes.
  Generation generate(const GenerateOptions& options, int64_t sample = 0,
                      const std::function<void(std::string_view)>& on_text = {}) const;

  int64_t prompt_tokens() const { return static_cast<int64_t>(prompt_.size()); }
  double prompt_seconds() const { return prompt_seconds_; }
  /// Bytes of the state that one continuation carries; the same at any length.
  int64_t state_bytes() const { return decoding_.state_bytes(); }

 private:
  LanguageModel model_;
  const Tokenizer& tokenizer_;
  std::vector<int32_t> prompt_;
  Decoding decoding_;
  double prompt_seconds_ = 0;
};

}  // namespace efla
