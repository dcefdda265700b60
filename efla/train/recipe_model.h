// The [model] section of a recipe: a preset or a family's defaults, and the keys that change them.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "efla/nn/config.h"
#include "efla/train/recipe_settings.h"

namespace efla {

class ModelSection {
 public:
  /// The family that `settings` name: model.preset, model.model_type, or "efla". `name` stands for
  /// the recipe in messages. Throws UsageError for an unknown or contradictory one.
  ModelSection(const Settings& settings, const std::string& name);

  /// Every key that [model] takes in this family, dotted: "model.hidden_size", ...
  std::vector<std::string> keys() const;
  bool knows(const std::string& key) const;

  /// Takes one setting whose key the section knows; throws UsageError for a value of another type.
  void assign(const std::string& key, const Setting& setting);

  /// The validated model of the preset or the defaults and all that was assigned.
  ModelConfig finish() const;

 private:
  std::string name_;
  nlohmann::json fields_;  // key -> default, for types; nested keys as "attn.layers"
  nlohmann::json model_;   // the config's JSON so far
};

/// Dotted key -> TOML text of every value of the model; keys without a value are left out.
std::map<std::string, std::string> model_settings(const ModelConfig& model);

}  // namespace efla
