// Tasks from beginning to end: read, prompt, score, sum up.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "efla/eval/passkey.h"
#include "efla/eval/task_metrics.h"
#include "efla/eval/task_prompts.h"
#include "efla/eval/tasks.h"
#include "efla/io/tokenizer.h"
#include "efla/nn/language_model.h"

namespace efla {

struct TaskRunOptions {
  PromptOptions prompt;
  int64_t limit = 0;  // samples of each task, the first ones; 0 = all
  int64_t batch_tokens = 8192;
  bool share_contexts = true;
  std::filesystem::path output;  // folder of the per-sample logs; empty: none are written
  std::function<void(const std::string& task, const LikelihoodProgress&)> progress;  // may be empty
};

enum class TaskStatus { kDone, kAbsent, kFailed };

struct TaskResult {
  std::string task;
  TaskStatus status = TaskStatus::kDone;
  std::string message;  // of what is absent or failed
  std::string path;     // of the file
  int64_t samples = 0, shots = 0;
  int64_t resumed = 0;                            // samples that the log held already
  int64_t truncated = 0;                          // samples whose context did not fit
  int64_t tokens_read = 0, tokens_requested = 0;  // by the model; and if no context were shared
  double seconds = 0;
  std::vector<Metric> metrics;
};

/// Evaluates a task that was read. Throws Error as the functions above do.
TaskResult run_task(LanguageModel model, const Tokenizer& tokenizer, const EvalTask& task,
                    const TaskRunOptions& options);

/// Finds, reads and evaluates a task. Of a task whose file is absent or cannot be used, or that
/// fails, the result says so; nothing is thrown.
TaskResult try_task(LanguageModel model, const Tokenizer& tokenizer, const std::string& name,
                    const std::vector<std::string>& folders, const TaskRunOptions& options);

/// The task passkey at one length; errors as try_task().
TaskResult try_passkey(LanguageModel model, const Tokenizer& tokenizer,
                       const PasskeyOptions& passkey, const TaskRunOptions& options);

/// The results of a run: a Markdown table, and the same with all details as JSON.
std::string markdown_table(const std::vector<TaskResult>& results);
nlohmann::ordered_json to_json(const TaskResult& result);

}  // namespace efla
