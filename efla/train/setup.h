// Everything a run reads, opened and checked against the recipe before anything is written.
#pragma once

#include <memory>
#include <string>

#include "efla/io/dataset.h"
#include "efla/io/tokenizer.h"
#include "efla/train/recipe.h"

namespace efla {

struct TrainingSetup {
  /// Opens tokenizer and shards and completes `recipe`: vocab_size and the bos and eos tokens come
  /// from the tokenizer unless the recipe gave them, its fingerprint always. Throws UsageError when
  /// tokenizer, shards and model do not fit together or the machine cannot hold the model, Error
  /// for damaged files.
  explicit TrainingSetup(Recipe& recipe);

  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<TokenDataset> train_data;
  std::unique_ptr<TokenDataset> valid_data;  // null: none
};

}  // namespace efla
