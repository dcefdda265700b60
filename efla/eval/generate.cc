#include "efla/eval/generate.h"

#include <fmt/format.h>

#include <chrono>
#include <limits>

#include "efla/eval/stop_strings.h"
#include "efla/io/error.h"
#include "efla/io/utf8.h"

namespace efla {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

void GenerateOptions::validate() const {
  sampling.validate();
  if (max_tokens < 1)
    throw UsageError(fmt::format("max_tokens is {} but must be 1 or more", max_tokens));
}

std::string to_string(StopReason reason) {
  switch (reason) {
    case StopReason::kEndOfText:
      return "end of text";
    case StopReason::kStopString:
      return "stop string";
    case StopReason::kMaxTokens:
      return "max tokens";
  }
  return "";
}

Generator::Generator(LanguageModel model, const Tokenizer& tokenizer)
    : model_(std::move(model)), tokenizer_(tokenizer), decoding_(model_) {
  if (tokenizer_.vocab_size() > model_->config().vocab_size) {
    throw UsageError(
        fmt::format("the tokenizer {} has {} tokens but the model only {}; use the tokenizer that "
                    "the model was trained with",
                    tokenizer_.path(), tokenizer_.vocab_size(), model_->config().vocab_size));
  }
}

void Generator::read_prompt(std::string_view prompt) {
  const auto begin = std::chrono::steady_clock::now();
  validate_utf8(prompt, "the prompt");
  prompt_.clear();
  const int32_t first = tokenizer_.bos_id() >= 0 ? tokenizer_.bos_id() : tokenizer_.eos_id();
  if (first >= 0) prompt_.push_back(first);
  const std::vector<int32_t> ids = tokenizer_.encode(prompt);
  prompt_.insert(prompt_.end(), ids.begin(), ids.end());
  if (prompt_.empty()) {
    throw UsageError(fmt::format(
        "the prompt is empty and the tokenizer {} has no token to begin a text with; give a prompt",
        tokenizer_.path()));
  }
  decoding_ = Decoding(model_);
  decoding_.read(prompt_);
  prompt_seconds_ = seconds_since(begin);
}

Generation Generator::generate(const GenerateOptions& options, int64_t sample,
                               const std::function<void(std::string_view)>& on_text) const {
  options.validate();
  Decoding decoding = decoding_;
  Sampler sampler(options.sampling, static_cast<uint64_t>(sample));
  for (const int32_t token : prompt_) sampler.observe(token);
  StreamDecoder decoder(tokenizer_, prompt_);
  StopMatcher matcher(options.stop);
  Generation result;
  const auto emit = [&](const std::string& text) {
    if (text.empty()) return;
    result.text += text;
    if (on_text) on_text(text);
  };

  const auto begin = std::chrono::steady_clock::now();
  // A model may have more (padding) tokens than the tokenizer; those are never drawn.
  const auto drawable = static_cast<size_t>(tokenizer_.vocab_size());
  std::vector<float> logits;
  while (static_cast<int64_t>(result.tokens.size()) < options.max_tokens && !matcher.stopped()) {
    if (!result.tokens.empty()) decoding.read({&result.tokens.back(), 1});
    logits.assign(decoding.logits().begin(), decoding.logits().begin() + drawable);
    const int32_t eos = tokenizer_.eos_id();
    if (options.ignore_eos && eos >= 0) {
      logits[static_cast<size_t>(eos)] = -std::numeric_limits<float>::infinity();
    }
    const int32_t token = sampler.sample(logits);
    result.tokens.push_back(token);
    if (token == eos) {
      result.reason = StopReason::kEndOfText;
      break;
    }
    emit(matcher.push(decoder.push(token)));
  }
  emit(matcher.push(decoder.finish()));
  if (matcher.stopped()) result.reason = StopReason::kStopString;
  emit(matcher.finish());
  result.seconds = seconds_since(begin);
  return result;
}

}  // namespace efla
