#include "efla/nn/config_reader.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "efla/io/error.h"
#include "efla/nn/config_text.h"

namespace efla {

namespace {

using nlohmann::json;

// Book-keeping of fla and transformers that no computation depends on.
constexpr std::array kBookkeepingKeys = {"architectures",
                                         "auto_map",
                                         "attn_mode",
                                         "chunk_size",
                                         "dtype",
                                         "torch_dtype",
                                         "transformers_version",
                                         "use_cache",
                                         "fuse_norm",
                                         "fuse_swiglu",
                                         "fuse_cross_entropy",
                                         "fuse_linear_cross_entropy"};
// Found in published checkpoints; without effect on the mathematics, but worth a line.
constexpr std::array kObsoleteKeys = {"norm_first"};

template <size_t N>
bool contains(const std::array<const char*, N>& keys, const std::string& key) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

// A JSON number, infinity as transformers writes it included.
std::optional<double> number(const json& value) {
  if (value.is_number()) return value.get<double>();
  if (value.is_object() && value.size() == 1 && value.contains("__float__")) {
    if (value["__float__"] == "Infinity") return std::numeric_limits<double>::infinity();
    if (value["__float__"] == "-Infinity") return -std::numeric_limits<double>::infinity();
  }
  return std::nullopt;
}

}  // namespace

FieldReader::FieldReader(const json& object, const std::string& where)
    : object_(object), where_(where) {
  if (!object.is_object()) {
    throw UsageError(fmt::format("{}: must be a JSON object, not {}", where, object.type_name()));
  }
}

void FieldReader::read(const char* key, bool& out) {
  if (const json* value = find(key)) {
    if (!value->is_boolean()) fail(key, "true or false", *value);
    out = value->get<bool>();
  }
}

void FieldReader::read(const char* key, int64_t& out) {
  if (const json* value = find(key)) out = integer(key, *value);
}

void FieldReader::read(const char* key, std::optional<int64_t>& out) {
  const json* value = find(key);
  if (!value) return;
  out = value->is_null() ? std::optional<int64_t>() : std::optional<int64_t>(integer(key, *value));
}

void FieldReader::read(const char* key, double& out) {
  if (const json* value = find(key)) {
    if (!value->is_number()) fail(key, "a number", *value);
    out = value->get<double>();
  }
}

void FieldReader::read(const char* key, std::string& out) {
  if (const json* value = find(key)) {
    if (!value->is_string()) fail(key, "a string", *value);
    out = value->get<std::string>();
  }
}

void FieldReader::read(const char* key, std::vector<int64_t>& out) {
  const json* value = find(key);
  if (!value) return;
  if (!value->is_array()) fail(key, "an array of integers", *value);
  out.clear();
  for (const json& element : *value) out.push_back(integer(key, element));
}

void FieldReader::read_range(const char* key, double& low, double& high) {
  const json* value = find(key);
  if (!value) return;
  const bool pair = value->is_array() && value->size() == 2;
  const std::optional<double> first = pair ? number((*value)[0]) : std::nullopt;
  const std::optional<double> second = pair ? number((*value)[1]) : std::nullopt;
  if (!first || !second) fail(key, "an array of two numbers", *value);
  low = *first;
  high = *second;
}

void FieldReader::only(const char* key, std::initializer_list<json> accepted, const char* reason) {
  const json* value = find(key);
  if (!value || std::find(accepted.begin(), accepted.end(), *value) != accepted.end()) return;
  fail(key, fmt::format("{} ({})", accepted.begin()->dump(), reason), *value);
}

void FieldReader::without_effect(const char* key, const json& usual) {
  const json* value = find(key);
  if (value && !value->is_null() && *value != usual) ineffective_.emplace_back(key);
}

bool FieldReader::is_null(const char* key) const {
  const auto found = object_.find(key);
  return found != object_.end() && found->is_null();
}

const json* FieldReader::object(const char* key) {
  const json* value = find(key);
  if (!value || value->is_null()) return nullptr;
  if (!value->is_object()) fail(key, "null or an object", *value);
  return value;
}

std::vector<std::string> FieldReader::unused() const {
  std::vector<std::string> keys = ineffective_;
  for (const auto& [key, value] : object_.items()) {
    if (known_.count(key) || contains(kBookkeepingKeys, key)) continue;
    const bool off = value.is_null() || (value.is_boolean() && !value.get<bool>());
    if (!contains(kObsoleteKeys, key) && !key.starts_with('_') && !off) {
      throw UsageError(fmt::format(
          "{}: unknown key {} = {} may change the mathematics; remove it, or set it to null if "
          "it does not matter",
          where_, key, shown_json(value)));
    }
    keys.push_back(key);
  }
  return keys;
}

const json* FieldReader::find(const char* key) {
  known_.insert(key);
  const auto found = object_.find(key);
  return found == object_.end() ? nullptr : &*found;
}

int64_t FieldReader::integer(const char* key, const json& value) const {
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX);
  if (!fits) fail(key, "an integer", value);
  return value.get<int64_t>();
}

void FieldReader::fail(const char* key, const std::string& expected, const json& found) const {
  throw UsageError(
      fmt::format("{}: {} must be {}, not {}", where_, key, expected, shown_json(found)));
}

json optional_json(const std::optional<int64_t>& value) {
  return value ? json(*value) : json(nullptr);
}

json number_json(double value) {
  if (std::isinf(value)) return {{"__float__", value > 0 ? "Infinity" : "-Infinity"}};
  return value;
}

}  // namespace efla
