// The folder of one run: who may use it, and whether it holds something to go on with.
//
//   recipe.toml    every value of the run        metrics.jsonl  one JSON object per step
//   checkpoints/   step-XXXXXXXX folders         loss.png       the loss curve
//   final/         the trained model             train.lock     held while a process trains here
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "efla/io/atomic_file.h"
#include "efla/train/recipe.h"

namespace efla {

class RunFolder {
 public:
  /// Creates or opens `recipe.train.out` and locks it until destruction. A folder that holds a run
  /// of another recipe, or checkpoints of unknown origin, is refused with UsageError naming the
  /// settings that differ; one that another process uses or that cannot be written, with Error.
  explicit RunFolder(const Recipe& recipe);

  /// Whether the folder held a run of this recipe already.
  bool resuming() const { return resuming_; }

  std::string path() const { return path_.string(); }
  std::filesystem::path metrics_path() const { return path_ / "metrics.jsonl"; }
  std::filesystem::path picture_path() const { return path_ / "loss.png"; }

 private:
  std::filesystem::path path_;
  std::unique_ptr<FileLock> lock_;
  bool resuming_ = false;
};

/// `path`, or PATH-2, PATH-3, ...: the first that does not exist.
std::string first_free_folder(const std::string& path);

}  // namespace efla
