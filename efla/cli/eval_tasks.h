// The options of `efla eval --tasks`, apart from eval.cc, which measures loss on text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "efla/cli/commands.h"
#include "efla/eval/task_run.h"
#include "efla/io/tokenizer.h"
#include "efla/nn/language_model.h"

namespace efla::cli {

struct TaskArguments {
  std::vector<std::string> tasks;
  std::vector<int64_t> passkey_lengths = {1024, 2048, 4096};
  PasskeyOptions passkey;
  std::string haystack, output, bos = "once";
  TaskRunOptions options;
  bool separate_contexts = false;
};

/// Adds the options that only tasks have.
void add_task_options(CLI::App& command, TaskArguments& arguments);

/// What a run of tasks is about, for its record.
struct TaskModel {
  LanguageModel model;
  const Tokenizer& tokenizer;
  std::string folder;  // of the model
};

/// Evaluates the tasks on the files of `folders`, prints the table (json: one line per task on
/// standard output, the table on standard error) and writes --output. Throws Error in the end when
/// a task gave no result.
void run_tasks(TaskArguments arguments, const TaskModel& model,
               const std::vector<std::string>& folders, bool json);

}  // namespace efla::cli
