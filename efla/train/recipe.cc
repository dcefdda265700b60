#include "efla/train/recipe.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <toml++/toml.h>

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

namespace efla {
namespace {

using nlohmann::json;

// One value as it was written, with the place it came from.
struct Setting {
  json value;
  std::string text;   // as written on a command line; empty for values from a file
  std::string place;  // "configs/tiny.toml:12" or "the command line"
};
using Settings = std::map<std::string, Setting>;

const char* const kSections[] = {"model", "data", "optimizer", "schedule", "train"};

std::string type_name(const json& value) {
  if (value.is_boolean()) return "true or false";
  if (value.is_number_integer()) return "an integer";
  if (value.is_number_float()) return "a number";
  if (value.is_string()) return "a string";
  if (value.is_array()) return "an array";
  return "a table";
}

json to_json_value(const toml::node& node) {
  if (const auto* v = node.as_boolean()) return v->get();
  if (const auto* v = node.as_integer()) return v->get();
  if (const auto* v = node.as_floating_point()) return v->get();
  if (const auto* v = node.as_string()) return v->get();
  if (const auto* v = node.as_array()) {
    json array = json::array();
    for (const toml::node& element : *v) array.push_back(to_json_value(element));
    return array;
  }
  return json::object();  // dates and tables: no key takes one
}

std::string show(const Setting& setting) {
  return setting.text.empty() ? setting.value.dump() : setting.text;
}

[[noreturn]] void refuse(const std::string& key, const Setting& setting,
                         const std::string& expected) {
  throw UsageError(
      fmt::format("{}: {} = {} must be {}", setting.place, key, show(setting), expected));
}

// ---- From TOML and overrides to Settings -------------------------------------------------------

Settings read_table(const toml::table& root, const std::string& name) {
  Settings settings;
  for (const auto& [section, node] : root) {
    const std::string head(section.str());
    const auto place = [&](const toml::node& at) {
      return fmt::format("{}:{}", name, at.source().begin.line);
    };
    if (!node.is_table()) {
      settings[head] = {to_json_value(node), "", place(node)};
      continue;
    }
    const toml::table& table = *node.as_table();
    if (table.empty()) settings.try_emplace(head + ".", Setting{json::object(), "", place(node)});
    for (const auto& [key, value] : table) {
      settings[head + "." + std::string(key.str())] = {to_json_value(value), "", place(value)};
    }
  }
  return settings;
}

toml::table parse_toml(const std::string& text, const std::string& name) {
  try {
    return toml::parse(text, name);
  } catch (const toml::parse_error& error) {
    throw UsageError(fmt::format("{}:{}: not valid TOML: {}", name, error.source().begin.line,
                                 error.description()));
  }
}

// The text after '=' in TOML syntax; whatever is not TOML is a bare string.
json override_value(const std::string& text) {
  try {
    const toml::table table = toml::parse("v = " + text);
    const toml::node* node = table.get("v");
    if (table.size() == 1 && !node->is_table() && !node->is_date() && !node->is_time() &&
        !node->is_date_time()) {
      return to_json_value(*node);
    }
  } catch (const toml::parse_error&) {
  }
  return text;
}

void apply_override(Settings& settings, const std::string& text) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0) {
    throw UsageError(
        fmt::format("the command line: '{}' is not an override; write section.key=value, for "
                    "example train.steps=100",
                    text));
  }
  const std::string value = text.substr(equals + 1);
  settings[text.substr(0, equals)] = {override_value(value), value, "the command line"};
}

// ---- From Settings to the recipe ---------------------------------------------------------------

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

// The fields of [model] with their default values; constants of the format are no settings.
json model_fields() {
  json fields = ModelConfig{}.to_json();
  for (const char* fixed : {"architectures", "torch_dtype"}) fields.erase(fixed);
  // Absent means "derived": to_json() may leave these out.
  for (const char* optional : {"q_norm", "intermediate_size", "pad_token_id"}) {
    if (!fields.contains(optional)) fields[optional] = nullptr;
  }
  if (fields["q_norm"].is_null()) fields["q_norm"] = "";
  return fields;
}

bool names_token(const std::string& key) { return key.ends_with("_token_id"); }

void assign_model(json& model, const std::string& key, const Setting& setting,
                  const json& standard) {
  const std::string dotted = "model." + key;
  json value = setting.value;
  if (standard.is_string() && !setting.text.empty() && !value.is_string()) value = setting.text;
  if (value.is_number_float() && standard.is_number_integer()) {
    refuse(dotted, setting, "an integer");
  }
  const bool numbers = standard.is_number_float() && value.is_number();
  const bool optional_integer = standard.is_null() && value.is_number_integer();
  if (!numbers && !optional_integer && type_name(value) != type_name(standard)) {
    refuse(dotted, setting, standard.is_null() ? "an integer" : type_name(standard));
  }
  if (value.is_number()) {
    const double low = names_token(key) ? -1 : 0;  // -1: no such token
    const double number = value.get<double>();
    if (!(number >= low && number <= 1e9)) {
      refuse(dotted, setting, fmt::format("a number from {} to 1e9", low));
    }
  }
  model[key] = value == -1 ? json() : value;
}

[[noreturn]] void refuse_unknown(const std::string& key, const Setting& setting,
                                 const std::vector<std::string>& known) {
  std::string what = key;
  if (!what.empty() && what.back() == '.') what.pop_back();
  const bool is_section =
      std::find(std::begin(kSections), std::end(kSections), what) != std::end(kSections);
  if (is_section) {
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
  const json model_defaults = model_fields();
  const std::vector<RecipeField> fields = recipe_fields(recipe);
  std::vector<std::string> known;
  for (const RecipeField& field : fields) known.push_back(field.key);
  for (const auto& item : model_defaults.items()) known.push_back("model." + item.key());

  json model = {{"model_type", "efla"}};  // what is not given here has its default there
  for (const auto& [key, setting] : settings) {
    const auto field = std::find_if(fields.begin(), fields.end(),
                                    [&key](const RecipeField& f) { return f.key == key; });
    if (field != fields.end()) {
      assign(*field, setting);
    } else if (key.rfind("model.", 0) == 0 && model_defaults.contains(key.substr(6))) {
      assign_model(model, key.substr(6), setting, model_defaults[key.substr(6)]);
    } else if (key.back() != '.' ||
               std::find(std::begin(kSections), std::end(kSections),
                         key.substr(0, key.size() - 1)) == std::end(kSections)) {
      refuse_unknown(key, setting, known);
    }
  }
  check_whole(recipe, name);
  try {
    recipe.model = ModelConfig::from_json(model, name + ": [model]");
  } catch (const json::exception& error) {
    throw UsageError(fmt::format("{}: [model]: {}", name, error.what()));
  }
  for (const auto& [key, setting] : settings) {
    if (key.rfind("model.", 0) == 0) recipe.given_model_keys.insert(key.substr(6));
  }
  return recipe;
}

std::string toml_text(const json& value) {
  if (value.is_string()) return value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (value.is_number_float()) {
    std::string text = fmt::format("{}", value.get<double>());  // shortest that reads back the same
    if (text.find_first_of(".e") == std::string::npos) text += ".0";
    return text;
  }
  return value.dump();
}

}  // namespace

Recipe Recipe::parse(const std::string& text, const std::string& name,
                     const std::vector<std::string>& overrides) {
  Settings settings = read_table(parse_toml(text, name), name);
  for (const std::string& override_text : overrides) apply_override(settings, override_text);
  return from_settings(settings, name);
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
  const json model_json = model.to_json(), fields = model_fields();
  for (const auto& item : fields.items()) {
    const json value = model_json.value(item.key(), json());
    if (!value.is_null()) {
      all["model." + item.key()] = toml_text(value);
    } else if (names_token(item.key())) {
      all["model." + item.key()] = "-1";  // TOML has no null
    }
  }
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
    deciding += key + "=" + value + "\n";
  }
  return fnv1a_hex(deciding);
}

}  // namespace efla
