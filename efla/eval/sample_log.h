// What the model said to each sample of a task, line by line in a file: for audits, and so that an
// evaluation that was stopped goes on where it was.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "efla/eval/task_metrics.h"
#include "efla/eval/task_prompts.h"
#include "efla/io/metrics.h"

namespace efla {

/// A checksum of everything that decides a sample's outcome beside the model: the requests' tokens.
std::string prompt_fingerprint(const Prompt& prompt);

/// samples_TASK.jsonl. Lines come in the order in which samples are done; finish() sorts them.
class SampleLog {
 public:
  /// Opens `path` and keeps the lines that it holds.
  explicit SampleLog(const std::filesystem::path& path);

  /// The outcome that the file holds for this sample, if its requests were the same.
  std::optional<SampleOutcome> find(int64_t index, const std::string& fingerprint) const;

  /// Appends a line.
  void write(const TaskSpec& spec, int64_t index, const EvalSample& sample,
             const std::string& prefix, const Prompt& prompt, const SampleOutcome& outcome);

  /// Replaces the file by the lines of samples 0 .. count - 1 in order.
  void finish(int64_t count);

 private:
  std::filesystem::path path_;
  std::unordered_map<int64_t, nlohmann::json> lines_;
  std::unique_ptr<MetricsLog> log_;
};

}  // namespace efla
