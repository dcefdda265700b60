// Evaluation sets with the prompts and metrics of lm-evaluation-harness's tasks of the same names
// (docs/evaluation.md, "Tasks"). Reads local files only: the layouts that the sets' authors
// publish, the columns of their copies on the Hugging Face hub, and {query, choices, gold} lines.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "efla/eval/task_records.h"

namespace efla {

enum class TaskKind {
  kMultipleChoice,  // which of several continuations (or contexts) is the likeliest
  kLastWord,        // the log-likelihood of one continuation, and whether it is the greedy one
  kRolling,         // the log-likelihood of whole documents
  kRetrieval        // whether what stood in the context is what the model says next
};

/// One question as text. The context ends where the continuation begins; a blank between the two
/// belongs to the continuation.
struct EvalSample {
  std::string origin;                      // "PATH:LINE"
  std::vector<std::string> contexts;       // one, or one for each choice
  std::vector<std::string> continuations;  // one for each choice, or one
  std::vector<std::string> choices;        // whose length normalises: without the delimiter
  int64_t gold = 0;                        // index of the right choice
  int64_t words = 0, bytes = 0;            // kRolling: of the original text

  size_t request_count() const { return std::max(contexts.size(), continuations.size()); }
  const std::string& context(size_t request) const {
    return contexts.size() == 1 ? contexts[0] : contexts[request];
  }
  const std::string& continuation(size_t request) const {
    return continuations.size() == 1 ? continuations[0] : continuations[request];
  }
  /// The sample with its answer, as it stands before another one in a few-shot prompt.
  std::string as_example() const;
};

/// What is known of a task before its file is read.
struct TaskSpec {
  std::string name;
  TaskKind kind = TaskKind::kMultipleChoice;
  std::vector<std::string> files;        // names to look for, without .gz and .xz
  std::vector<std::string> train_files;  // likewise, for few-shot examples
  bool has_test_split = false;  // in lm-evaluation-harness, which then draws examples without
                                // asking whether one of them is the question itself
  bool normalized = true;       // acc_norm and acc_bytes make sense: the choices differ
  std::string headline;         // the metric that papers report
  EvalSample (*read)(const TaskRecord&) = nullptr;  // not for kRolling
};

/// Every task, in the order of the tables in the literature.
const std::vector<TaskSpec>& task_specs();
/// The task of that name; UsageError listing the names otherwise.
const TaskSpec& task_spec(const std::string& name);

struct EvalTask {
  TaskSpec spec;
  std::string path;  // of the file that was read
  std::vector<EvalSample> samples;
  // Few-shot examples are drawn from these; empty when none were asked for.
  std::string example_path;
  std::vector<EvalSample> examples;
};

/// Reads a task from the first of its files that one of the folders holds; nothing when none does.
/// With `examples`, few-shot examples come from the training file, or from the task's own file when
/// there is none. Throws Error naming file and line of a record that cannot be used.
std::optional<EvalTask> load_task(const TaskSpec& spec, const std::vector<std::string>& folders,
                                  bool examples);

/// The first file that exists of folder/NAME, with .gz or .xz behind it too; "" when there is none.
std::string find_task_file(const std::vector<std::string>& names,
                           const std::vector<std::string>& folders);

/// The samples of one file of the task.
std::vector<EvalSample> read_samples(const TaskSpec& spec, const std::string& path);

}  // namespace efla
