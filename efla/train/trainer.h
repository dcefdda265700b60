// The training loop: one recipe in, a run folder out.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "efla/nn/language_model.h"
#include "efla/train/recipe.h"
#include "efla/train/run_log.h"

namespace efla {

struct TrainOptions {
  bool fresh = false;  // start over in the first free folder OUT-2, OUT-3, ... instead of resuming
  std::vector<std::string> command;  // what started this run, without --fresh; for advice

  /// Called between the backward pass and the update of each step; tests inject NaN here.
  std::function<void(int64_t step, LanguageModel& model)> on_gradients;
};

struct TrainResult {
  std::string run_folder;
  std::string checkpoint;   // newest checkpoint folder
  std::string model;        // folder with the trained model alone
  std::string picture;      // loss curve; empty without gnuplot
  int64_t step = 0;         // updates done
  int64_t total_steps = 0;  // of the recipe; more than `step` after a time limit
  int64_t skipped_steps = 0;
  double train_loss = 0;                  // nats per token, last update
  HeldOutPoint first_held_out, held_out;  // before the first update and now; NaN without data
  std::string convention;                 // of both, "rows-LENGTH" (held_out.h)
  bool whole_held_out = false;            // `held_out` is over all held-out rows
  std::string go_on;                      // how an unfinished run goes on: "the same command ..."
};

/// Trains, or goes on with the run that the recipe's folder already holds. Prints progress to
/// stderr. Throws UsageError for a request that cannot be met and Error for what fails later; also
/// Error when SIGINT or SIGTERM ends the run after its checkpoint is written.
TrainResult train(Recipe recipe, const TrainOptions& options = {});

}  // namespace efla
