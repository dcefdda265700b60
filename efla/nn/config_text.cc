#include "efla/nn/config_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "efla/io/error.h"

namespace efla {
namespace {

using nlohmann::json;

constexpr size_t kMaxBytes = 1'000'000;
constexpr size_t kMaxDepth = 32;

// The text with Infinity, -Infinity and NaN (outside strings) in JSON's clothes. Throws when the
// brackets nest too deeply for what will later walk over the values.
std::string to_strict_json(std::string_view text, const std::string& where) {
  std::string strict;
  strict.reserve(text.size());
  bool in_string = false;
  size_t depth = 0;
  for (size_t i = 0; i < text.size();) {
    const char c = text[i];
    if (!in_string) {
      bool replaced = false;
      for (const std::string_view word : {"-Infinity", "Infinity", "NaN"}) {
        if (!text.substr(i).starts_with(word)) continue;
        strict += fmt::format("{{\"__float__\": \"{}\"}}", word);
        i += word.size();
        replaced = true;
        break;
      }
      if (replaced) continue;
      if ((c == '{' || c == '[') && ++depth > kMaxDepth) {
        throw Error(fmt::format("{}: nests more than {} levels deep", where, kMaxDepth));
      }
      if ((c == '}' || c == ']') && depth > 0) --depth;
    }
    if (c == '"') in_string = !in_string;
    if (in_string && c == '\\' && i + 1 < text.size()) strict += text[i++];
    strict += text[i++];
  }
  return strict;
}

// What a message can show as it is: short, without control characters.
bool is_name(const std::string& key) {
  constexpr size_t kLongest = 100;
  return key.size() <= kLongest && std::none_of(key.begin(), key.end(), [](char c) {
           return static_cast<unsigned char>(c) < ' ' || c == '\x7f';
         });
}

}  // namespace

std::string shown_json(const json& value) {
  constexpr size_t kShown = 60;
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  return text.size() > kShown ? text.substr(0, kShown) + "..." : text;
}

json parse_config_text(std::string_view text, const std::string& where) {
  if (text.size() > kMaxBytes) {
    throw Error(fmt::format("{}: has {} bytes, far more than a config.json", where, text.size()));
  }
  // Keys of the objects that are open, so that none may come twice.
  std::vector<std::set<std::string>> keys;
  std::string problem;
  const auto watch = [&](int, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end && !keys.empty()) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.empty()) {
      const std::string& key = value.get_ref<const std::string&>();
      if (!is_name(key)) problem = "has a key that is no name: " + shown_json(value);
      if (!keys.back().insert(key).second)
        problem = "names the key " + shown_json(value) + " twice";
    }
    return true;
  };
  json parsed;
  try {
    parsed = json::parse(to_strict_json(text, where), watch);
  } catch (const json::exception& error) {
    const std::string reason = error.what();
    throw Error(
        fmt::format("{}: is not valid JSON ({})", where, reason.substr(0, reason.find('\n'))));
  }
  if (!problem.empty()) throw Error(fmt::format("{}: {}; mend the file", where, problem));
  return parsed;
}

}  // namespace efla
