// A recipe's values as they were written: dotted key -> value and the place it came from, before
// anything is known about the keys.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace efla {

struct Setting {
  nlohmann::json value;
  std::string text;   // as written on a command line; empty for values from a file
  std::string place;  // "configs/tiny.toml:12" or "the command line"
};
using Settings = std::map<std::string, Setting>;

/// TOML text (`name` stands for the file in messages) and "section.key=value" overrides, of which a
/// later one wins. Tables become dotted keys; an empty table leaves the key "table.". Throws
/// UsageError for what is neither TOML nor an override.
Settings read_settings(const std::string& text, const std::string& name,
                       const std::vector<std::string>& overrides);

/// Throws UsageError "PLACE: KEY = VALUE must be EXPECTED".
[[noreturn]] void refuse(const std::string& key, const Setting& setting,
                         const std::string& expected);

/// "an integer", "a string", ... : what a value is, for messages.
std::string type_name(const nlohmann::json& value);

/// The value in TOML; infinity may be {"__float__": "Infinity"}.
std::string toml_text(const nlohmann::json& value);

}  // namespace efla
