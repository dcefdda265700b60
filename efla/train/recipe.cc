#include "efla/train/recipe.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "efla/io/atomic_file.h"
#include "efla/io/checksum.h"
#include "efla/io/error.h"
#include "efla/train/nearest_name.h"
#include "efla/train/recipe_fields.h"
#include "efla/train/recipe_model.h"
#include "efla/train/recipe_settings.h"

namespace efla {
namespace {

using nlohmann::json;

const char* const kSections[] = {"model", "data", "optimizer", "schedule", "train"};

void assign(const RecipeField& field, const Setting& setting) {
  const json& value = setting.value;
  if (auto* const* target = std::get_if<std::string*>(&field.value)) {
    // A bare word on the command line may look like a number and still be a file name.
    if (!value.is_string() && setting.text.empty()) refuse(field.key, setting, "a string");
    const std::string text = value.is_string() ? value.get<std::string>() : setting.text;
    if (!field.choices.empty() &&
        std::find(field.choices.begin(), field.choices.end(), text) == field.choices.end()) {
      refuse(field.key, setting, fmt::format("one of {}", fmt::join(field.choices, ", ")));
    }
    **target = text;
    return;
  }
  if (auto* const* target = std::get_if<bool*>(&field.value)) {
    if (!value.is_boolean()) refuse(field.key, setting, "true or false");
    **target = value.get<bool>();
    return;
  }
  const bool integer = std::holds_alternative<int64_t*>(field.value);
  const std::string expected =
      fmt::format("{} from {} to {}", integer ? "an integer" : "a number", field.low, field.high);
  if (!value.is_number()) refuse(field.key, setting, expected);
  const double number = value.get<double>();
  if (!(number >= field.low && number <= field.high)) refuse(field.key, setting, expected);
  if (!integer) {
    *std::get<double*>(field.value) = number;
    return;
  }
  if (number != std::floor(number)) refuse(field.key, setting, expected);
  *std::get<int64_t*>(field.value) =
      value.is_number_integer() ? value.get<int64_t>() : static_cast<int64_t>(number);
}

bool is_section(const std::string& name) {
  return std::find(std::begin(kSections), std::end(kSections), name) != std::end(kSections);
}

[[noreturn]] void refuse_unknown(const std::string& key, const Setting& setting,
                                 const std::vector<std::string>& known) {
  std::string what = key;
  if (!what.empty() && what.back() == '.') what.pop_back();
  if (is_section(what)) {
    throw UsageError(fmt::format("{}: '{}' is a section: write [{}] and its keys below it",
                                 setting.place, what, what));
  }
  throw UsageError(fmt::format("{}: unknown key '{}'; did you mean '{}'?", setting.place, what,
                               nearest_name(what, known)));
}

void check_whole(const Recipe& recipe, const std::string& name) {
  const auto fail = [&](const std::string& sentence) { throw UsageError(name + ": " + sentence); };
  if (recipe.data.train.empty()) fail("data.train is missing: give the folder of token shards");
  if (recipe.train.out.empty()) fail("train.out is missing: give the folder for the run's results");
  if ((recipe.train.steps > 0) == (recipe.train.tokens > 0)) {
    fail(
        "give the length of the run as either train.steps or train.tokens (above 0), not both or "
        "neither");
  }
  if (recipe.schedule.warmup_steps > recipe.total_steps()) {
    fail(fmt::format("schedule.warmup_steps = {} must not exceed the {} steps of the run",
                     recipe.schedule.warmup_steps, recipe.total_steps()));
  }
}

Recipe from_settings(const Settings& settings, const std::string& name) {
  Recipe recipe;
  ModelSection model(settings, name);
  const std::vector<RecipeField> fields = recipe_fields(recipe);
  std::vector<std::string> known;
  known.reserve(fields.size());
  for (const RecipeField& field : fields) known.push_back(field.key);
  for (const std::string& key : model.keys()) known.push_back(key);

  for (const auto& [key, setting] : settings) {
    const auto field = std::find_if(fields.begin(), fields.end(),
                                    [&key](const RecipeField& f) { return f.key == key; });
    const bool empty_section = key.back() == '.' && is_section(key.substr(0, key.size() - 1));
    if (field != fields.end()) {
      assign(*field, setting);
    } else if (model.knows(key)) {
      model.assign(key, setting);
      recipe.given_model_keys.insert(key.substr(key.find('.') + 1));
    } else if (!empty_section) {
      refuse_unknown(key, setting, known);
    }
  }
  check_whole(recipe, name);
  recipe.model = model.finish();
  return recipe;
}

}  // namespace

Recipe Recipe::parse(const std::string& text, const std::string& name,
                     const std::vector<std::string>& overrides) {
  return from_settings(read_settings(text, name, overrides), name);
}

Recipe Recipe::load(const std::string& path, const std::vector<std::string>& overrides) {
  if (is_folder(path)) {
    throw UsageError(
        fmt::format("{}: is a folder; give a recipe file such as configs/quickstart.toml", path));
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw UsageError(
        fmt::format("{}: cannot open the recipe; give the path of a TOML file such as "
                    "configs/quickstart.toml",
                    path));
  }
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return parse(text, path, overrides);
}

std::map<std::string, std::string> Recipe::settings() const {
  std::map<std::string, std::string> all;
  Recipe copy = *this;
  for (const RecipeField& field : recipe_fields(copy)) {
    all[field.key] = std::visit([](auto* value) { return toml_text(json(*value)); }, field.value);
  }
  all.merge(model_settings(model));
  return all;
}

std::string Recipe::to_toml() const {
  const std::map<std::string, std::string> all = settings();
  std::string text;
  for (const std::string section : kSections) {
    text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", section);
    for (const auto& [key, value] : all) {
      if (key.rfind(section + ".", 0) == 0) {
        text += fmt::format("{} = {}\n", key.substr(section.size() + 1), value);
      }
    }
  }
  return text;
}

int64_t Recipe::total_steps() const {
  if (train.steps > 0) return train.steps;
  return (train.tokens + tokens_per_step() - 1) / tokens_per_step();
}

bool may_change_on_resume(const std::string& key) {
  Recipe recipe;
  for (const RecipeField& field : recipe_fields(recipe)) {
    if (field.key == key) return field.may_change_on_resume;
  }
  return false;
}

std::string recipe_hash(const Recipe& recipe) {
  std::string deciding;
  for (const auto& [key, value] : recipe.settings()) {
    if (may_change_on_resume(key)) continue;
    deciding.append(key).append("=").append(value).append("\n");
  }
  return fnv1a_hex(deciding);
}

}  // namespace efla
