// Checkpoints: folders RUN/checkpoints/step-XXXXXXXX that are whole or not there.
//
// A folder holds config.json and model.safetensors (a model folder that load_pretrained reads),
// optimizer.safetensors (moments and random state), the tokenizer, and trainer.json, which records
// the position of the run and the size and checksum of every other file. It is written under
// another name, flushed to the disk and renamed, so a kill or a full disk leaves the older ones as
// they were.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "efla/io/dataset.h"
#include "efla/nn/language_model.h"
#include "efla/train/optimizer.h"

namespace efla {

/// What a run needs, beside weights and moments, to go on as if it had never stopped.
struct TrainerState {
  int64_t step = 0;              // updates done, skipped ones included
  int64_t tokens_seen = 0;       // target tokens trained on
  int64_t skipped_steps = 0;     // updates left out for a non-finite loss or gradient
  int64_t bad_in_a_row = 0;      // of those, the ones just before now
  double seconds = 0;            // training time so far
  int64_t threads = 0;           // the losses repeat bit for bit on this many
  DatasetPosition position;      // where the next batch begins
  std::string recipe_hash;       // recipe_hash() of the run
  std::string data_fingerprint;  // of the training shards
  at::Tensor random_state;       // uint8; torch's CPU generator
};

struct CheckpointStore {
  explicit CheckpointStore(std::string run_folder);

  /// Called with "model", "optimizer", "tokenizer", "trainer", "rename", "prune" before each stage
  /// of save(); tests inject failures here.
  using StageHook = std::function<void(std::string_view stage)>;

  /// Writes RUN/checkpoints/step-XXXXXXXX and returns its path, then removes all but the newest
  /// `keep`. On failure throws Error and nothing has changed.
  std::string save(const TrainerState& state, const LanguageModel& model, const AdamW& optimizer,
                   const std::string& tokenizer_path, int64_t keep) const;

  /// Complete checkpoint folders, newest first. Cheap: contents are not read.
  std::vector<std::string> list() const;

  /// The newest checkpoint that verifies. Damaged newer ones are renamed to *.corrupt and reported
  /// through `warn`. Nothing if there is none at all; throws Error if all are damaged.
  std::optional<std::string> newest_good(const std::function<void(const std::string&)>& warn) const;

  /// Removes what an interrupted save or prune left behind. Call with the run locked.
  void remove_leftovers() const;

  std::string folder;  // RUN/checkpoints
  StageHook hook;
};

/// Throws Error, in one sentence with the path, unless every file has its recorded size and
/// checksum. Returns the trainer's state (without random_state).
TrainerState verify_checkpoint(const std::string& folder);

/// Moments and random state from a verified folder; returns the trainer's state.
TrainerState load_checkpoint(const std::string& folder, AdamW& optimizer);

/// Accepts a model folder, a checkpoint or a run folder; returns the folder that holds config.json
/// (the newest checkpoint of a run). Throws UsageError when there is none.
std::string resolve_model_folder(const std::string& path);

}  // namespace efla
