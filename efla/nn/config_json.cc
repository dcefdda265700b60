// ModelConfig from and to JSON.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <set>

#include "efla/io/error.h"
#include "efla/io/log.h"
#include "efla/nn/config.h"

namespace efla {

namespace {

using nlohmann::json;

// Book-keeping of fla and transformers that no computation depends on.
constexpr std::array kBookkeepingKeys = {"architectures",
                                         "auto_map",
                                         "attn_mode",
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

class FieldReader {
 public:
  FieldReader(const json& object, const std::string& where) : object_(object), where_(where) {
    if (!object.is_object()) {
      throw UsageError(fmt::format("{}: must be a JSON object, not {}", where, object.type_name()));
    }
  }

  void read(const char* key, bool& out) {
    if (const json* value = find(key)) {
      if (!value->is_boolean()) fail(key, "true or false", *value);
      out = value->get<bool>();
    }
  }
  void read(const char* key, int64_t& out) {
    if (const json* value = find(key)) out = integer(key, *value);
  }
  void read(const char* key, std::optional<int64_t>& out) {
    if (const json* value = find(key)) {
      if (value->is_null()) {
        out.reset();
      } else {
        out = integer(key, *value);
      }
    }
  }
  void read(const char* key, double& out) {
    if (const json* value = find(key)) {
      if (!value->is_number()) fail(key, "a number", *value);
      out = value->get<double>();
    }
  }
  void read(const char* key, std::string& out) {
    if (const json* value = find(key)) {
      if (!value->is_string()) fail(key, "a string", *value);
      out = value->get<std::string>();
    }
  }
  /// One of `choices`, by the name that to_string gives it.
  template <typename Enum>
  void read(const char* key, Enum& out, std::initializer_list<Enum> choices) {
    const json* value = find(key);
    if (!value) return;
    std::string names;
    for (const Enum choice : choices) {
      if (value->is_string() && value->get_ref<const std::string&>() == to_string(choice)) {
        out = choice;
        return;
      }
      names += (names.empty() ? "" : ", ") + to_string(choice);
    }
    fail(key, "one of " + names, *value);
  }
  /// A feature of fla that has no counterpart here: only the value that leaves it off is accepted.
  void only(const char* key, std::initializer_list<json> accepted, const char* reason) {
    const json* value = find(key);
    if (!value || std::find(accepted.begin(), accepted.end(), *value) != accepted.end()) return;
    fail(key, fmt::format("{} ({})", accepted.begin()->dump(), reason), *value);
  }
  bool is_null(const char* key) const {
    const auto found = object_.find(key);
    return found != object_.end() && found->is_null();
  }

  /// The keys that were neither read nor are book-keeping. Each must be obsolete or switched off.
  std::vector<std::string> unused() const {
    std::vector<std::string> keys;
    for (const auto& [key, value] : object_.items()) {
      if (known_.count(key) || contains(kBookkeepingKeys, key)) continue;
      const bool off = value.is_null() || (value.is_boolean() && !value.get<bool>());
      if (!contains(kObsoleteKeys, key) && !key.starts_with('_') && !off) {
        throw UsageError(fmt::format(
            "{}: unknown key {} = {} may change the mathematics; remove it, or set it to null if "
            "it does not matter",
            where_, key, shorten(value)));
      }
      keys.push_back(key);
    }
    return keys;
  }

 private:
  template <size_t N>
  static bool contains(const std::array<const char*, N>& keys, const std::string& key) {
    return std::find(keys.begin(), keys.end(), key) != keys.end();
  }
  static std::string shorten(const json& value) {
    constexpr size_t kShown = 60;
    std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
    return text.size() > kShown ? text.substr(0, kShown) + "..." : text;
  }
  const json* find(const char* key) {
    known_.insert(key);
    const auto found = object_.find(key);
    return found == object_.end() ? nullptr : &*found;
  }
  int64_t integer(const char* key, const json& value) const {
    const bool fits = value.is_number_integer() &&
                      (!value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX);
    if (!fits) fail(key, "an integer", value);
    return value.get<int64_t>();
  }
  [[noreturn]] void fail(const char* key, const std::string& expected, const json& found) const {
    throw UsageError(
        fmt::format("{}: {} must be {}, not {}", where_, key, expected, shorten(found)));
  }

  const json& object_;
  const std::string& where_;
  std::set<std::string> known_;
};

void read_mathematics(FieldReader& reader, ModelConfig& c) {
  reader.read("rule", c.rule, {Rule::kLinear, Rule::kEuler, Rule::kRk2, Rule::kRk4, Rule::kExact});
  reader.read("beta_activation", c.beta_activation,
              {BetaActivation::kSigmoid, BetaActivation::kSoftplus, BetaActivation::kAdaptive});
  reader.read("qk_norm", c.qk_norm, {QkNorm::kNone, QkNorm::kL2});
  if (!reader.is_null("q_norm")) {
    QkNorm q_norm = c.qk_norm;
    reader.read("q_norm", q_norm, {QkNorm::kNone, QkNorm::kL2});
    if (q_norm != c.qk_norm) c.q_norm = q_norm;
  } else {
    reader.only("q_norm", {nullptr}, "as qk_norm");
  }
  reader.read(
      "qk_activation", c.qk_activation,
      {QkActivation::kSilu, QkActivation::kRelu, QkActivation::kElu, QkActivation::kIdentity});
  reader.read("use_beta", c.use_beta);
  reader.read("allow_neg_eigval", c.allow_neg_eigval);
  reader.read("use_gate", c.use_gate);
  reader.read("use_short_conv", c.use_short_conv);
  reader.read("conv_size", c.conv_size);
  reader.only("use_output_norm", {true}, "a layer without output norm is not implemented");
  reader.only("hidden_act", {"swish", "silu"}, "other MLP activations are not implemented");
  reader.only("attn", {nullptr}, "hybrid models with softmax layers are not implemented");
  reader.only("attnres_block_size", {nullptr}, "attention residuals are not implemented");
  reader.only("use_l2warp", {false}, "the l2warp loss is not implemented");
  reader.only("conv_bias", {false}, "convolutions have no bias");
}

void read_sizes(FieldReader& reader, ModelConfig& c) {
  reader.read("vocab_size", c.vocab_size);
  reader.read("hidden_size", c.hidden_size);
  reader.read("num_hidden_layers", c.num_hidden_layers);
  reader.read("num_heads", c.num_heads);
  reader.read("expand_k", c.expand_k);
  reader.read("expand_v", c.expand_v);
  if (reader.is_null("hidden_ratio")) {
    reader.only("hidden_ratio", {nullptr}, "the default");  // fla: null is 4
  } else {
    reader.read("hidden_ratio", c.hidden_ratio);
  }
  reader.read("intermediate_size", c.intermediate_size);
  reader.read("norm_eps", c.norm_eps);
  reader.read("initializer_range", c.initializer_range);
  reader.read("conv_initializer_range", c.conv_initializer_range);
  reader.read("tie_word_embeddings", c.tie_word_embeddings);
  reader.read("max_position_embeddings", c.max_position_embeddings);
  reader.read("bos_token_id", c.bos_token_id);
  reader.read("eos_token_id", c.eos_token_id);
  reader.read("pad_token_id", c.pad_token_id);
  reader.read("tokenizer_fingerprint", c.tokenizer_fingerprint);
}

json optional_json(const std::optional<int64_t>& value) {
  return value ? json(*value) : json(nullptr);
}

}  // namespace

ModelConfig ModelConfig::from_json(const json& object, const std::string& where,
                                   std::vector<std::string>* skipped) {
  FieldReader reader(object, where);
  std::string model_type = "efla";
  reader.read("model_type", model_type);
  ModelConfig config = model_type == "delta_net" ? delta_net() : ModelConfig();
  config.model_type = model_type;
  // Before the fields: the config of another family would fail at a field that is not its fault.
  if (model_type != "efla" && model_type != "delta_net") config.validate(where);
  read_mathematics(reader, config);
  read_sizes(reader, config);
  const std::vector<std::string> unused = reader.unused();
  if (skipped) *skipped = unused;
  for (const std::string& key : unused) {
    if (skipped) break;
    log_warning(fmt::format("{}: key {} is not used and has no effect here", where, key));
  }
  config.validate(where);
  return config;
}

ModelConfig ModelConfig::from_json_file(const std::filesystem::path& path,
                                        std::vector<std::string>* skipped) {
  std::ifstream file(path);
  if (!file) {
    throw Error(
        fmt::format("{}: cannot be opened; a model folder holds config.json and "
                    "model.safetensors",
                    path.string()));
  }
  json object;
  try {
    object = json::parse(file);
  } catch (const json::exception& error) {
    throw Error(fmt::format("{}: is not valid JSON ({})", path.string(), error.what()));
  }
  return from_json(object, path.string(), skipped);
}

json ModelConfig::to_json() const {
  json object = {
      {"model_type", model_type},
      {"qk_norm", to_string(qk_norm)},
      {"qk_activation", to_string(qk_activation)},
      {"use_beta", use_beta},
      {"allow_neg_eigval", allow_neg_eigval},
      {"use_gate", use_gate},
      {"use_short_conv", use_short_conv},
      {"conv_size", conv_size},
      {"use_output_norm", true},
      {"hidden_act", "swish"},
      {"vocab_size", vocab_size},
      {"hidden_size", hidden_size},
      {"num_hidden_layers", num_hidden_layers},
      {"num_heads", num_heads},
      {"expand_k", expand_k},
      {"expand_v", expand_v},
      {"hidden_ratio", hidden_ratio},
      {"intermediate_size", optional_json(intermediate_size)},
      {"norm_eps", norm_eps},
      {"initializer_range", initializer_range},
      {"tie_word_embeddings", tie_word_embeddings},
      {"max_position_embeddings", max_position_embeddings},
      {"bos_token_id", optional_json(bos_token_id)},
      {"eos_token_id", optional_json(eos_token_id)},
      {"pad_token_id", optional_json(pad_token_id)},
  };
  if (model_type == "delta_net") {
    object["architectures"] = {"DeltaNetForCausalLM"};
  } else {
    object["architectures"] = {"EflaForCausalLM"};
    object["conv_initializer_range"] = conv_initializer_range;
    object["rule"] = to_string(rule);
    object["beta_activation"] = to_string(beta_activation);
    if (q_norm) object["q_norm"] = to_string(*q_norm);
  }
  if (conv_initializer_range > 0) object["conv_initializer_range"] = conv_initializer_range;
  if (!tokenizer_fingerprint.empty()) object["tokenizer_fingerprint"] = tokenizer_fingerprint;
  return object;
}

}  // namespace efla
