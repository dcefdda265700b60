// The sequential-image study: every arm at every learning rate with every seed, several runs at
// once, each run a line of a results file that a second call goes on with.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "efla/experiments/image_data.h"
#include "efla/experiments/smnist_setting.h"

namespace efla {

struct StudyOptions {
  std::vector<RunSpec> runs;
  SmnistSetting setting;  // fingerprints and image counts are filled in from the data
  std::filesystem::path out = "runs/smnist";
  bool cuda = false;
  bool graphs = true;         // CUDA: capture the training step
  int64_t parallel_runs = 1;  // threads; on CUDA a stream each
  double time_limit = 0;      // seconds after which no run starts; 0: none
};

struct StudyResult {
  int64_t finished = 0;  // in this call
  int64_t skipped = 0;   // were in the file
  int64_t left = 0;      // wanted, not done and not failed: the time limit or a signal came first
  std::vector<std::string> failures;  // "efla, learning rate 0.003, seed 44: why"
  const char* signal = nullptr;       // "SIGINT" or "SIGTERM" where one ended the study
};

/// Runs what the results file lacks. A run that fails is reported, the others go on. Throws
/// UsageError when the file holds runs of another setting, Error when it cannot be read or another
/// process works on it.
StudyResult run_study(StudyOptions options, const ImageData& images);

}  // namespace efla
