#include "efla/nn/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "efla/io/error.h"
#include "efla/nn/config_family.h"

namespace efla {

namespace {

// Beyond every model that fits a machine of this field: a typing error, better said than allocated.
constexpr int64_t kMaxParameters = 1'000'000'000'000;
// int(x) of a product must not fall short by a rounding error.
constexpr double kRoundingSlack = 1e-9;

bool is_known(const std::string& model_type) {
  const auto& all = model_types();
  return std::find(all.begin(), all.end(), model_type) != all.end();
}

void require_known(const std::string& model_type, const Validator& check) {
  check.require(is_known(model_type), "model_type",
                fmt::format("one of {}", fmt::join(model_types(), ", ")),
                fmt::format("\"{}\"", model_type));
}

void validate_common(const ModelConfig& c, const Validator& check) {
  check.range("vocab_size", c.vocab_size, 1, 16'777'216);
  check.range("hidden_size", c.hidden_size, 1, 131'072);
  check.range("num_hidden_layers", c.num_hidden_layers, 1, 1024);
  check.positive("hidden_ratio", c.hidden_ratio, 64);
  if (c.intermediate_size) check.range("intermediate_size", *c.intermediate_size, 1, 4'194'304);
  check.positive("norm_eps", c.norm_eps, 1);
  check.positive("initializer_range", c.initializer_range, 10);
  check.require(c.conv_initializer_range >= 0 && c.conv_initializer_range <= 10,
                "conv_initializer_range", "a number from 0 (as initializer_range) to 10",
                fmt::format("{}", c.conv_initializer_range));
  check.range("max_position_embeddings", c.max_position_embeddings, 1, int64_t{1} << 40);
  check.token("bos_token_id", c.bos_token_id, c.vocab_size);
  check.token("eos_token_id", c.eos_token_id, c.vocab_size);
  check.token("pad_token_id", c.pad_token_id, c.vocab_size);
}

// Parameters of the mixer of one layer.
int64_t mixer_parameters(const ModelConfig& c, int64_t layer) {
  switch (c.mixer_kind(layer)) {
    case MixerKind::kMamba2:
      return mamba2_family::mixer_parameters(c);
    case MixerKind::kAttention:
      return attention_family::mixer_parameters(c);
    case MixerKind::kDelta:
      break;
  }
  return delta_family::mixer_parameters(c);
}

}  // namespace

void Validator::require(bool ok, std::string_view key, std::string_view expected,
                        std::string_view found) const {
  if (!ok) throw UsageError(fmt::format("{}: {} must be {}, not {}", where_, key, expected, found));
}

void Validator::range(std::string_view key, int64_t value, int64_t low, int64_t high) const {
  require(value >= low && value <= high, key, fmt::format("an integer from {} to {}", low, high),
          std::to_string(value));
}

void Validator::positive(std::string_view key, double value, double high) const {
  require(value > 0 && value <= high, key, fmt::format("a number above 0 and at most {}", high),
          fmt::format("{}", value));
}

void Validator::token(std::string_view key, const std::optional<int64_t>& id,
                      int64_t vocab_size) const {
  if (!id) return;
  require(*id >= 0 && *id < vocab_size, key,
          fmt::format("null or a token from 0 to {}", vocab_size - 1), std::to_string(*id));
}

int64_t scaled_size(int64_t size, double factor) {
  return static_cast<int64_t>(static_cast<double>(size) * factor + kRoundingSlack);
}

const std::vector<std::string>& model_types() {
  static const std::vector<std::string> kTypes = {"efla",       "delta_net", "gated_deltanet",
                                                  "gated_efla", "mamba2",    "transformer"};
  return kTypes;
}

ModelConfig ModelConfig::of_type(const std::string& model_type, const std::string& where) {
  require_known(model_type, Validator(where));
  ModelConfig config;
  config.model_type = model_type;
  if (model_type == "delta_net" || model_type == "gated_deltanet") {
    config.rule = Rule::kEuler;
    config.qk_norm = QkNorm::kL2;
  }
  if (config.is_gated()) {
    config.use_gate = true;
    config.num_heads = 6;
    config.expand_v = 2;
    config.num_hidden_layers = 21;
  }
  if (model_type == "mamba2") {
    config.num_hidden_layers = 48;
    config.norm_eps = 1e-5;
    config.pad_token_id = 0;
  }
  if (model_type == "transformer") config.attn = AttentionConfig();
  return config;
}

void ModelConfig::validate(const std::string& where) const {
  const Validator check(where);
  require_known(model_type, check);
  validate_common(*this, check);
  const bool mamba2_model = model_type == "mamba2", transformer = model_type == "transformer";
  if (mamba2_model) {
    mamba2_family::validate(*this, check);
    check.require(!attn, "attn", "null for model_type \"mamba2\"", "a table of softmax layers");
  } else if (!transformer) {
    delta_family::validate(*this, check);
  }
  check.require(attn || !transformer, "attn", "given for model_type \"transformer\"", "absent");
  if (attn) attention_family::validate(*this, check);
  const int64_t total = parameter_count().total();
  check.require(total <= kMaxParameters, "the number of parameters",
                fmt::format("at most {}", kMaxParameters), std::to_string(total));
}

MixerKind ModelConfig::mixer_kind(int64_t layer) const {
  if (model_type == "mamba2") return MixerKind::kMamba2;
  if (model_type == "transformer") return MixerKind::kAttention;
  const bool softmax =
      attn && std::find(attn->layers.begin(), attn->layers.end(), layer) != attn->layers.end();
  return softmax ? MixerKind::kAttention : MixerKind::kDelta;
}

bool ModelConfig::is_gated() const {
  return model_type == "gated_deltanet" || model_type == "gated_efla";
}

bool ModelConfig::has_mlp() const { return model_type != "mamba2"; }

int64_t ModelConfig::mlp_size() const {
  if (intermediate_size) return *intermediate_size;
  constexpr int64_t kMultiple = 256;
  const int64_t size =
      static_cast<int64_t>(static_cast<double>(hidden_size) * hidden_ratio * 2 / 3);
  return (size + kMultiple - 1) / kMultiple * kMultiple;
}

ParameterCount ModelConfig::parameter_count() const {
  const int64_t d = hidden_size;
  // A block's norms: before the mixer and, where there is one, before the MLP.
  const int64_t rest = has_mlp() ? 3 * d * mlp_size() + 2 * d : d;
  ParameterCount count;
  count.embedding = vocab_size * d;
  count.output_head = tie_word_embeddings ? 0 : vocab_size * d;
  count.other = d;
  for (int64_t i = 0; i < num_hidden_layers; ++i) count.other += mixer_parameters(*this, i) + rest;
  return count;
}

int64_t ModelConfig::state_elements() const {
  int64_t total = 0;
  for (int64_t i = 0; i < num_hidden_layers; ++i) {
    const MixerKind kind = mixer_kind(i);
    if (kind == MixerKind::kDelta) total += delta_family::state_elements(*this);
    if (kind == MixerKind::kMamba2) total += mamba2_family::state_elements(*this);
  }
  return total;
}

int64_t ModelConfig::state_elements_per_token() const {
  int64_t total = 0;
  for (int64_t i = 0; i < num_hidden_layers; ++i) {
    if (mixer_kind(i) != MixerKind::kAttention) continue;
    total += attention_family::state_elements_per_token(*this);
  }
  return total;
}

std::string to_string(Rule rule) { return rule_name(rule); }

std::string to_string(BetaActivation activation) {
  constexpr std::array kNames = {"sigmoid", "softplus", "adaptive"};
  return kNames.at(static_cast<size_t>(activation));
}

std::string to_string(QkNorm norm) {
  constexpr std::array kNames = {"none", "l2", "sum"};
  return kNames.at(static_cast<size_t>(norm));
}

std::string to_string(QkActivation activation) {
  constexpr std::array kNames = {"silu", "relu", "elu", "identity"};
  return kNames.at(static_cast<size_t>(activation));
}

}  // namespace efla
