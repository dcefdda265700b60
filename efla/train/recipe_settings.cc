#include "efla/train/recipe_settings.h"

#include <fmt/format.h>

#include <toml++/toml.h>

#include <cmath>

#include "efla/io/error.h"

namespace efla {
namespace {

using nlohmann::json;

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
  return json::object();  // dates, and tables in arrays: no key takes one
}

// `prefix`: the dotted name of the table, with a dot at its end; empty for the root.
void read_table(const toml::table& table, const std::string& prefix, const std::string& name,
                Settings& settings) {
  for (const auto& [key, node] : table) {
    const std::string dotted = prefix + std::string(key.str());
    const std::string place = fmt::format("{}:{}", name, node.source().begin.line);
    if (const toml::table* inner = node.as_table()) {
      if (inner->empty()) settings.try_emplace(dotted + ".", Setting{json::object(), "", place});
      read_table(*inner, dotted + ".", name, settings);
    } else {
      settings[dotted] = {to_json_value(node), "", place};
    }
  }
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
    return text;
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

}  // namespace

Settings read_settings(const std::string& text, const std::string& name,
                       const std::vector<std::string>& overrides) {
  Settings settings;
  read_table(parse_toml(text, name), "", name, settings);
  for (const std::string& override_text : overrides) apply_override(settings, override_text);
  return settings;
}

void refuse(const std::string& key, const Setting& setting, const std::string& expected) {
  const std::string value = setting.text.empty() ? setting.value.dump() : setting.text;
  throw UsageError(fmt::format("{}: {} = {} must be {}", setting.place, key, value, expected));
}

std::string type_name(const json& value) {
  if (value.is_boolean()) return "true or false";
  if (value.is_number_integer()) return "an integer";
  if (value.is_number_float()) return "a number";
  if (value.is_string()) return "a string";
  if (value.is_array()) return "an array";
  return "a table";
}

std::string toml_text(const json& value) {
  if (value.is_string()) return value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (value.is_number_float()) {
    const double number = value.get<double>();
    if (std::isinf(number)) return number > 0 ? "inf" : "-inf";
    std::string text = fmt::format("{}", number);  // shortest that reads back the same
    if (text.find_first_of(".e") == std::string::npos) text += ".0";
    return text;
  }
  if (value.is_array()) {
    std::string text;
    for (const json& element : value) text += (text.empty() ? "" : ", ") + toml_text(element);
    return "[" + text + "]";
  }
  if (value.is_object() && value.contains("__float__")) {
    return value["__float__"] == "Infinity" ? "inf" : "-inf";
  }
  return value.dump();
}

}  // namespace efla
