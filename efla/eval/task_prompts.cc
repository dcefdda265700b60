#include "efla/eval/task_prompts.h"

#include <fmt/format.h>

#include <cmath>

#include "efla/eval/perplexity.h"
#include "efla/eval/python_random.h"
#include "efla/eval/python_text.h"
#include "efla/io/error.h"

namespace efla {
namespace {

using Tokens = std::vector<int32_t>;

int32_t prefix_token(const Tokenizer& tokenizer) {
  return tokenizer.bos_id() >= 0 ? tokenizer.bos_id() : tokenizer.eos_id();
}

Tokens concatenated(Tokens front, const Tokens& back) {
  front.insert(front.end(), back.begin(), back.end());
  return front;
}

bool same_question(const EvalSample& a, const EvalSample& b) {
  return a.contexts == b.contexts && a.continuations == b.continuations && a.gold == b.gold;
}

// Indices of the examples before one sample. When the sample itself may be among the examples, one
// more is drawn and the sample is left out.
std::vector<int64_t> draw_examples(const EvalTask& task, const EvalSample& sample, int64_t shots,
                                   bool exclude, PythonRandom& random) {
  const auto size = static_cast<int64_t>(task.examples.size());
  std::vector<int64_t> drawn = random.sample(size, shots + (exclude ? 1 : 0));
  if (!exclude) return drawn;
  const auto is_sample = [&](int64_t i) {
    return same_question(task.examples[static_cast<size_t>(i)], sample);
  };
  std::erase_if(drawn, is_sample);
  if (static_cast<int64_t>(drawn.size()) < shots) {  // the set holds the question twice
    std::vector<int64_t> pool;
    for (int64_t i = 0; i < size; ++i) {
      if (!is_sample(i)) pool.push_back(i);
    }
    drawn.clear();
    for (const int64_t i : random.sample(static_cast<int64_t>(pool.size()), shots)) {
      drawn.push_back(pool[static_cast<size_t>(i)]);
    }
  }
  drawn.resize(static_cast<size_t>(shots));
  return drawn;
}

Tokens encode_context(const Tokenizer& tokenizer, std::string_view text, BosMode bos) {
  Tokens tokens;
  if (bos != BosMode::kNever && tokenizer.bos_id() >= 0) tokens.push_back(tokenizer.bos_id());
  return concatenated(std::move(tokens), tokenizer.encode(text));
}

[[noreturn]] void fail(const EvalSample& sample, const std::string& message) {
  throw Error(sample.origin + ": " + message);
}

// A continuation's tokens are those that the text of context and continuation has beyond the
// context's own; white space at the context's end is tokenised with the continuation.
LikelihoodRequest encode_pair(const EvalSample& sample, std::string context,
                              std::string continuation, const Tokenizer& tokenizer, BosMode bos) {
  LikelihoodRequest request;
  const int32_t prefix = prefix_token(tokenizer);
  if (context.empty()) {
    request.continuation = tokenizer.encode(continuation);
    if (!request.continuation.empty() && request.continuation[0] == prefix) {
      request.continuation.erase(request.continuation.begin());
    }
    if (prefix >= 0) request.context = {prefix};
  } else {
    const size_t kept = strip_right(context).size();
    continuation.insert(0, context, kept);
    context.resize(kept);
    request.context = encode_context(tokenizer, context, bos);
    const Tokens whole = encode_context(tokenizer, context + continuation, bos);
    if (whole.size() > request.context.size()) {
      request.continuation.assign(whole.begin() + static_cast<ptrdiff_t>(request.context.size()),
                                  whole.end());
    }
    if (request.context.empty() && prefix >= 0) request.context = {prefix};
  }
  if (request.context.empty()) {
    fail(sample, "the context is empty and the tokenizer has no token to begin a text with");
  }
  if (request.continuation.empty()) {
    fail(sample, "a choice adds no token to its context, so it has no probability of its own");
  }
  return request;
}

// Whether tokens were cut off.
bool truncate(const EvalSample& sample, LikelihoodRequest& request, int64_t max_length) {
  const auto continuation = static_cast<int64_t>(request.continuation.size());
  if (continuation > max_length) {
    fail(sample, fmt::format("a choice has {} tokens but the model reads only {} at once; raise "
                             "--window",
                             continuation, max_length));
  }
  const int64_t excess =
      static_cast<int64_t>(request.context.size()) + continuation - (max_length + 1);
  if (excess <= 0) return false;
  request.context.erase(request.context.begin(), request.context.begin() + excess);
  return true;
}

Prompt rolling_prompt(const EvalSample& sample, const Tokenizer& tokenizer, int64_t vocab_size,
                      const PromptOptions& options) {
  Prompt prompt;
  Tokens tokens = tokenizer.encode(sample.continuations[0]);
  const int32_t bos = tokenizer.bos_id();
  if (options.bos == BosMode::kHarness && bos >= 0) tokens.insert(tokens.begin(), bos);
  if (tokens.empty()) fail(sample, "the document has no tokens");
  const int32_t prefix = prefix_token(tokenizer);
  if (prefix >= 0) {
    tokens.insert(tokens.begin(), prefix);
  } else {
    // Nothing can stand before the first token: its code length is that of a uniform guess.
    prompt.extra_log = -std::log(static_cast<double>(vocab_size));
  }
  const auto count = static_cast<int64_t>(tokens.size()) - 1;
  const auto slice = [&tokens](int64_t begin, int64_t end) {
    return Tokens(tokens.begin() + begin, tokens.begin() + end);
  };
  for (const Window& window : rolling_windows({count}, options.max_length)) {
    const int64_t begin = window.begin + 1, end = begin + window.length + 1;
    prompt.requests.push_back({slice(begin, end - window.scored), slice(end - window.scored, end)});
  }
  if (prompt.requests.size() > 1) prompt.requests.push_back({slice(0, 1), slice(1, count + 1)});
  return prompt;
}

}  // namespace

BosMode parse_bos_mode(const std::string& name) {
  if (name == "once") return BosMode::kOnce;
  if (name == "harness") return BosMode::kHarness;
  if (name == "never") return BosMode::kNever;
  throw UsageError(fmt::format("\"{}\" is none of once, harness, never", name));
}

std::vector<std::string> few_shot_prefixes(const EvalTask& task, size_t count,
                                           const PromptOptions& options) {
  std::vector<std::string> prefixes(count);
  if (options.shots == 0 || task.spec.kind == TaskKind::kRolling) return prefixes;
  const bool exclude = !task.spec.has_test_split || task.example_path == task.path;
  const auto available = static_cast<int64_t>(task.examples.size()) - (exclude ? 1 : 0);
  if (options.shots > available) {
    throw UsageError(fmt::format("{} examples before each question were asked for but {} holds {}",
                                 options.shots, task.example_path, available));
  }
  PythonRandom random(options.shot_seed);
  for (size_t i = 0; i < count; ++i) {
    for (const int64_t example :
         draw_examples(task, task.samples[i], options.shots, exclude, random)) {
      prefixes[i] += task.examples[static_cast<size_t>(example)].as_example();
    }
  }
  return prefixes;
}

Prompt make_prompt(const TaskSpec& spec, const EvalSample& sample, const std::string& prefix,
                   const Tokenizer& tokenizer, int64_t vocab_size, const PromptOptions& options) {
  if (spec.kind == TaskKind::kRolling) {
    return rolling_prompt(sample, tokenizer, vocab_size, options);
  }
  Prompt prompt;
  for (size_t i = 0; i < sample.request_count(); ++i) {
    prompt.requests.push_back(encode_pair(sample, prefix + sample.context(i),
                                          sample.continuation(i), tokenizer, options.bos));
    if (spec.kind != TaskKind::kRetrieval &&
        truncate(sample, prompt.requests.back(), options.max_length)) {
      ++prompt.truncated;
    }
  }
  return prompt;
}

}  // namespace efla
