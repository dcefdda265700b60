// The table of a recipe's keys: where each value lives and what it may be. Reading, writing and
// comparing recipes all walk this table; the keys of [model] come from ModelConfig itself.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "efla/train/recipe.h"

namespace efla {

struct RecipeField {
  std::string key;  // "train.steps"
  std::variant<int64_t*, double*, bool*, std::string*> value;
  double low = 0, high = 0;               // numbers: smallest and largest allowed, inclusive
  std::vector<std::string> choices = {};  // strings: empty means any
  bool may_change_on_resume = false;      // does not alter the losses
};

/// The fields of all sections but [model], pointing into `recipe`.
std::vector<RecipeField> recipe_fields(Recipe& recipe);

}  // namespace efla
