#include "efla/train/recipe_model.h"

#include <fmt/format.h>

#include "efla/io/error.h"
#include "efla/nn/presets.h"

namespace efla {
namespace {

using nlohmann::json;

const std::string kPrefix = "model.";
const std::string kAttn = "attn.";

bool starts_with(const std::string& text, const std::string& prefix) {
  return text.rfind(prefix, 0) == 0;
}
bool names_token(const std::string& key) { return key.ends_with("_token_id"); }

// {"attn": {"layers": ...}} -> {"attn.layers": ...}.
json flatten(const json& config) {
  json flat = json::object();
  for (const auto& [key, value] : config.items()) {
    if (key != "attn") {
      flat[key] = value;
    } else if (value.is_object()) {
      for (const auto& [inner, inner_value] : value.items()) flat[kAttn + inner] = inner_value;
    }
  }
  return flat;
}

// A family's keys with their default values; constants of the format are no settings.
json model_fields(const std::string& model_type) {
  const ModelConfig standard = ModelConfig::of_type(model_type);
  json fields = json::object();
  const bool delta = standard.mixer_kind(0) == MixerKind::kDelta;
  if (delta) {
    // fla's families know fewer keys than ours; naming one of ours there deserves its own sentence.
    fields = ModelConfig::of_type(standard.is_gated() ? "gated_efla" : "efla").to_json();
    ModelConfig hybrid = standard;
    hybrid.attn = AttentionConfig();
    fields.update(flatten(hybrid.to_json()));
    fields[kAttn + "num_kv_heads"] = nullptr;
    fields["q_norm"] = "";
  }
  fields.update(flatten(standard.to_json()));
  for (const char* fixed : {"architectures", "attn"}) fields.erase(fixed);
  if (standard.mixer_kind(0) != MixerKind::kAttention) fields["conv_initializer_range"] = 0.0;
  if (model_type == "mamba2") fields.erase("num_heads");  // derived
  return fields;
}

std::string family_of(const Settings& settings, const std::string& name) {
  const auto given = settings.find(kPrefix + "model_type");
  if (given == settings.end()) return "efla";
  if (!given->second.value.is_string()) refuse(given->first, given->second, "a string");
  // Its own sentence for an unknown one.
  return ModelConfig::of_type(given->second.value.get<std::string>(),
                              fmt::format("{}: [model]", name))
      .model_type;
}

}  // namespace

ModelSection::ModelSection(const Settings& settings, const std::string& name) : name_(name) {
  const auto chosen = settings.find(kPrefix + "preset");
  std::string family = family_of(settings, name);
  if (chosen == settings.end()) {
    model_ = {{"model_type", family}};
  } else {
    if (!chosen->second.value.is_string()) refuse(chosen->first, chosen->second, "a string");
    const ModelConfig config = preset(chosen->second.value.get<std::string>(),
                                      fmt::format("{}: {}", chosen->second.place, chosen->first));
    if (settings.count(kPrefix + "model_type") && family != config.model_type) {
      refuse(kPrefix + "model_type", settings.at(kPrefix + "model_type"),
             fmt::format("\"{}\", the family of the preset, or absent", config.model_type));
    }
    family = config.model_type;
    model_ = config.to_json();
    if (family == "mamba2") model_.erase("num_heads");  // derived from what else is given
  }
  fields_ = model_fields(family);
}

std::vector<std::string> ModelSection::keys() const {
  std::vector<std::string> keys = {kPrefix + "preset"};
  for (const auto& item : fields_.items()) keys.push_back(kPrefix + item.key());
  return keys;
}

bool ModelSection::knows(const std::string& key) const {
  return key == kPrefix + "preset" ||
         (starts_with(key, kPrefix) && fields_.contains(key.substr(kPrefix.size())));
}

void ModelSection::assign(const std::string& dotted, const Setting& setting) {
  const std::string key = dotted.substr(kPrefix.size());
  if (key == "preset") return;  // the constructor's
  const json& standard = fields_[key];
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
  if (value == -1) value = json();
  if (starts_with(key, kAttn)) {
    model_["attn"][key.substr(kAttn.size())] = value;
  } else {
    model_[key] = value;
  }
}

ModelConfig ModelSection::finish() const {
  try {
    return ModelConfig::from_json(model_, name_ + ": [model]");
  } catch (const json::exception& error) {
    throw UsageError(fmt::format("{}: [model]: {}", name_, error.what()));
  }
}

std::map<std::string, std::string> model_settings(const ModelConfig& model) {
  std::map<std::string, std::string> all;
  const json values = flatten(model.to_json()), fields = model_fields(model.model_type);
  for (const auto& item : fields.items()) {
    const json value = values.value(item.key(), json());
    if (!value.is_null()) {
      all[kPrefix + item.key()] = toml_text(value);
    } else if (names_token(item.key())) {
      all[kPrefix + item.key()] = "-1";  // TOML has no null
    }
  }
  return all;
}

}  // namespace efla
