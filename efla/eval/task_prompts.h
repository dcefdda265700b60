// From a task's samples to what the model reads: few-shot prompts and their tokens, as
// lm-evaluation-harness makes them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "efla/eval/loglikelihood.h"
#include "efla/eval/tasks.h"
#include "efla/io/tokenizer.h"

namespace efla {

/// Where the tokenizer's BOS stands. lm-evaluation-harness leaves that to transformers' tokenizer,
/// so its numbers exist in all three ways (docs/evaluation.md, "BOS").
enum class BosMode {
  kOnce,     // before every context and every document
  kHarness,  // as a tokenizer that adds BOS by itself: also in front of a document's tokens, behind
             // the BOS that is its prefix, where it is predicted like any other token
  kNever     // before an empty context and before a document only
};

/// "once", "harness" or "never"; UsageError otherwise.
BosMode parse_bos_mode(const std::string& name);

struct PromptOptions {
  int64_t shots = 0;
  uint64_t shot_seed = 1234;  // lm-evaluation-harness's default
  int64_t max_length = 2048;  // tokens the model may read at once
  BosMode bos = BosMode::kOnce;
};

/// One sample as the model gets it.
struct Prompt {
  RequestGroup requests;
  int64_t truncated = 0;  // requests whose context lost tokens at its beginning
  double extra_log = 0;   // of a document's first token where nothing can stand before it
};

/// The text that stands before each sample's context: its few-shot examples. For the first `count`
/// samples, since each draws from the same sequence of random numbers. Throws UsageError when there
/// are too few examples.
std::vector<std::string> few_shot_prefixes(const EvalTask& task, size_t count,
                                           const PromptOptions& options);

/// The tokens of sample `index`. A context that is too long loses tokens on its left. kRolling: one
/// request for each window, then, if there are several, one that reads the whole document. Throws
/// Error naming the sample when a continuation has no token, or alone exceeds max_length.
Prompt make_prompt(const TaskSpec& spec, const EvalSample& sample, const std::string& prefix,
                   const Tokenizer& tokenizer, int64_t vocab_size, const PromptOptions& options);

}  // namespace efla
