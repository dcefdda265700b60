// A training recipe: one TOML file that says everything about a run.
//
// Sections: [model] (a preset or the fields of ModelConfig), [data], [optimizer], [schedule],
// [train]. Every value can be overridden as section.key=value. Unknown keys, wrong types and absurd
// values are refused.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "efla/nn/config.h"

namespace efla {

struct DataRecipe {
  std::string train;      // folder of token shards
  std::string valid;      // folder of held-out shards; empty: no held-out loss
  std::string tokenizer;  // .model file or "byte"; empty: tokenizer.model beside the shards
  int64_t length = 256;   // tokens in a row
  int64_t batch = 8;      // rows in a micro-batch
  bool verify = true;     // read every shard once at the start and compare its checksum
};

struct OptimizerRecipe {
  double learning_rate = 1e-3;  // the peak of the schedule
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  // decoupled; none on norms, biases and vectors
};

struct ScheduleRecipe {
  int64_t warmup_steps = 0;  // linear from `start` to the peak
  double start = 0.0;        // fraction of the peak that the warm-up begins from
  double floor = 0.1;        // fraction of the peak that the cosine ends at
};

struct TrainRecipe {
  std::string out;                // run folder: checkpoints, metrics.jsonl, recipe.toml, loss.png
  int64_t steps = 0;              // updates; give this or `tokens`
  int64_t tokens = 0;             // training tokens, rounded up to whole steps
  int64_t grad_accumulation = 1;  // micro-batches in a step
  double clip = 1.0;              // largest global gradient norm; 0: no clipping
  int64_t eval_interval = 100;    // steps between held-out losses; 0: only before and after
  int64_t eval_tokens = 0;        // held-out tokens per evaluation; 0: all
  int64_t checkpoint_interval = 500;  // steps between checkpoints; 0: only at the end
  int64_t keep = 2;                   // newest checkpoints that stay on disk
  int64_t seed = 42;                  // weights and data order
  int64_t threads = 0;                // 0: all cores
  std::string dtype = "float32";      // of weights and arithmetic: float32, or float64 for checks
  int64_t max_bad_steps = 10;         // skipped updates in a row that end the run
  double log_interval = 10;           // seconds between printed lines where there is no terminal
  double time_limit = 0;              // seconds after which the run saves and stops; 0: none
};

struct Recipe {
  ModelConfig model;
  DataRecipe data;
  OptimizerRecipe optimizer;
  ScheduleRecipe schedule;
  TrainRecipe train;

  /// Reads `path` and applies `overrides` ("section.key=value", TOML syntax, bare strings accepted;
  /// a later one wins). Throws UsageError naming key, value, place and what was expected.
  static Recipe load(const std::string& path, const std::vector<std::string>& overrides = {});

  /// The same for TOML text; `name` stands for the file in messages.
  static Recipe parse(const std::string& text, const std::string& name,
                      const std::vector<std::string>& overrides = {});

  /// Every value, as dotted key -> TOML text ("train.steps" -> "100").
  std::map<std::string, std::string> settings() const;

  /// Every value as TOML that parse() reads back to the same recipe.
  std::string to_toml() const;

  /// Tokens that one update sees.
  int64_t tokens_per_step() const { return data.length * data.batch * train.grad_accumulation; }

  /// Updates in the run, from `steps` or `tokens`.
  int64_t total_steps() const;

  /// Keys of [model] that the recipe or an override gave. What the tokenizer knows (vocab_size,
  /// bos_token_id, eos_token_id) is filled in from it unless given.
  std::set<std::string> given_model_keys;
};

/// Whether a setting may change between a run and its resumption: it does not alter the losses.
bool may_change_on_resume(const std::string& key);

/// A checksum over the settings that decide the losses, as hex.
std::string recipe_hash(const Recipe& recipe);

}  // namespace efla
