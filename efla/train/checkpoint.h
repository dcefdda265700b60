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
#include "efla/io/error.h"
#include "efla/nn/language_model.h"
#include "efla/train/optimizer.h"

namespace efla {

/// The bytes on the disk are not those that were written, or a file of them is gone. Other failures
/// to read (no right to, a failing disk, too many open files, another version) are plain Errors:
/// they say nothing against the checkpoint.
class DamagedCheckpoint : public Error {
 public:
  using Error::Error;
};

/// What a run needs, beside weights and moments, to go on as if it had never stopped.
struct TrainerState {
  int64_t step = 0;           // updates done, skipped ones included
  int64_t tokens_seen = 0;    // target tokens trained on
  int64_t skipped_steps = 0;  // updates left out for a non-finite loss or gradient
  int64_t bad_in_a_row = 0;   // of those, the ones just before now
  double seconds = 0;         // training time so far
  int64_t threads = 0;        // the losses repeat bit for bit on this many
  DataPosition position;      // where the next batch begins
  std::string recipe_hash;    // recipe_hash() of the run
  std::string data;           // TokenDataset::describe() of the training shards, as JSON text
};

struct Checkpoint {
  std::string folder;
  TrainerState state;
};

/// The checkpoints of one run.
class CheckpointStore {
 public:
  using Warn = std::function<void(const std::string& sentence)>;

  /// `warn` hears of damaged checkpoints and of old ones that cannot be removed.
  CheckpointStore(const std::string& run_folder, Warn warn);

  /// Writes checkpoints/step-XXXXXXXX and returns its path, then removes all but the newest `keep`
  /// (at least 1). `tokenizer_model` (may be empty) is stored as tokenizer.model. On failure throws
  /// Error, and every older checkpoint is as it was.
  std::string save(const TrainerState& state, const LanguageModel& model, const AdamW& optimizer,
                   const std::string& tokenizer_model, int64_t keep) const;

  /// Complete checkpoint folders, newest first. Cheap: only names are read. Throws Error when the
  /// folder of checkpoints cannot be read.
  std::vector<std::string> list() const;

  /// The newest checkpoint that verifies. Damaged newer ones are renamed to *.corrupt with a
  /// warning. Nothing if there are none at all; throws Error if all are damaged, or if one cannot
  /// be read for another reason.
  std::optional<Checkpoint> newest_good() const;

  /// Finishes or undoes what a killed run had begun. Call with the run locked.
  void recover() const;

  /// Called before each stage of save(): "model", "optimizer", "trainer", "rename", "prune". Tests
  /// inject failures here.
  std::function<void(std::string_view stage)> on_stage;

 private:
  void prune(int64_t keep) const;

  std::string folder_;  // RUN/checkpoints
  Warn warn_;
};

/// The trainer's state in a checkpoint. Throws DamagedCheckpoint, in one sentence with the path,
/// unless every file of the folder has its recorded size and checksum.
TrainerState verify_checkpoint(const std::string& folder);

/// Weights, moments and torch's random state back from a verified folder.
void load_checkpoint(const std::string& folder, LanguageModel& model, AdamW& optimizer);

/// Makes `folder` the model of `checkpoint` (config.json, model.safetensors, tokenizer.model)
/// without the trainer's files, atomically. Copies, so that what is done to the model leaves the
/// run as it is; checksums.json beside them holds their sizes and checksums.
void publish_model(const std::string& checkpoint, const std::string& folder);

/// Compares a model folder with its recorded checksums: trainer.json of a checkpoint,
/// checksums.json of a published model; a folder that has neither passes. Throws DamagedCheckpoint
/// naming the file.
void verify_model(const std::string& folder);

/// Accepts a model folder, a checkpoint or a run folder; returns the folder that holds config.json
/// (the newest checkpoint of a run). Throws UsageError when there is none.
std::string resolve_model_folder(const std::string& path);

}  // namespace efla
