// The fields of the delta-rule families: efla, delta_net, gated_deltanet, gated_efla.
#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "efla/nn/config_family.h"
#include "efla/nn/config_reader.h"

namespace efla {

namespace {

using nlohmann::json;

// fla's own two families, whose step rule and normalisation are fixed.
bool is_flas(const ModelConfig& c) {
  return c.model_type == "delta_net" || c.model_type == "gated_deltanet";
}

void read_norms(FieldReader& reader, ModelConfig& c) {
  const auto choices = {QkNorm::kNone, QkNorm::kL2, QkNorm::kSum};
  reader.read("qk_norm", c.qk_norm, choices);
  if (reader.is_null("q_norm")) {
    reader.only("q_norm", {nullptr}, "as qk_norm");
    return;
  }
  QkNorm q_norm = c.qk_norm;
  reader.read("q_norm", q_norm, choices);
  if (q_norm != c.qk_norm) c.q_norm = q_norm;
}

void read_head_sizes(FieldReader& reader, ModelConfig& c) {
  reader.read("num_heads", c.num_heads);
  reader.read("expand_v", c.expand_v);
  if (!c.is_gated()) {
    reader.read("expand_k", c.expand_k);
    return;
  }
  reader.read("head_dim", c.head_dim);
  reader.read("num_v_heads", c.num_v_heads);
  reader.without_effect("expand_k");  // in old files; head_dim decides
}

void validate_sizes(const ModelConfig& c, const Validator& check) {
  check.range("num_heads", c.num_heads, 1, kMaxHeads);
  check.range("conv_size", c.conv_size, 1, kMaxConvSize);
  check.positive("expand_k", c.expand_k, 16);
  check.positive("expand_v", c.expand_v, 16);
  const auto heads = [&](std::string_view key, int64_t size) {
    check.require(size > 0 && size % c.num_heads == 0, "num_heads",
                  fmt::format("a divisor of hidden_size * {} = {}", key, size),
                  std::to_string(c.num_heads));
    check.require(size / c.num_heads <= kMaxHeadSize, "num_heads",
                  fmt::format("at least {}, so that a head is no wider than {}",
                              (size + kMaxHeadSize - 1) / kMaxHeadSize, kMaxHeadSize),
                  std::to_string(c.num_heads));
  };
  heads("expand_k", c.key_size());
  heads("expand_v", c.value_size());
}

void validate_gated_sizes(const ModelConfig& c, const Validator& check) {
  check.range("num_heads", c.num_heads, 1, kMaxHeads);
  check.range("conv_size", c.conv_size, 1, kMaxConvSize);
  check.range("head_dim", c.head_dim, 1, kMaxHeadSize);
  check.positive("expand_v", c.expand_v, 16);
  const int64_t value_heads = c.value_heads();  // before anything is divided by it
  check.require(value_heads >= 1 && value_heads <= kMaxHeads && value_heads % c.num_heads == 0,
                "num_v_heads",
                fmt::format("a multiple of num_heads = {} and at most {}", c.num_heads, kMaxHeads),
                std::to_string(value_heads));
  const double value = static_cast<double>(c.head_dim) * c.expand_v;
  const double whole = static_cast<double>(c.head_value_size());
  check.require(
      whole >= 1 && std::abs(value - whole) <= 1e-5 * whole, "expand_v",
      fmt::format("such that head_dim * expand_v = {} * expand_v is a whole number", c.head_dim),
      fmt::format("{}", c.expand_v));
  check.require(c.head_value_size() <= kMaxHeadSize, "expand_v",
                fmt::format("such that head_dim * expand_v is at most {}", kMaxHeadSize),
                fmt::format("{}", c.expand_v));
}

// What fla's layers fix.
void validate_flas(const ModelConfig& c, const Validator& check) {
  const std::string ours = c.is_gated() ? "gated_efla" : "efla";
  const auto fixed = [&](bool ok, std::string_view key, std::string_view expected,
                         const std::string& found) {
    check.require(ok, key, fmt::format("{} for model_type \"{}\"", expected, c.model_type),
                  fmt::format("{} (use model_type \"{}\" for anything else)", found, ours));
  };
  fixed(c.rule == Rule::kEuler, "rule", "euler", to_string(c.rule));
  fixed(c.beta_activation == BetaActivation::kSigmoid, "beta_activation", "sigmoid",
        to_string(c.beta_activation));
  fixed(!c.q_norm || *c.q_norm == c.qk_norm, "q_norm", "absent",
        c.q_norm ? to_string(*c.q_norm) : "");
  fixed(c.use_output_norm, "use_output_norm", "true", "false");
  if (!c.is_gated()) {
    fixed(c.qk_norm != QkNorm::kNone, "qk_norm", "l2 or sum", to_string(c.qk_norm));
    return;
  }
  fixed(c.qk_norm == QkNorm::kL2, "qk_norm", "l2", to_string(c.qk_norm));
  fixed(c.qk_activation == QkActivation::kSilu, "qk_activation", "silu",
        to_string(c.qk_activation));
  fixed(c.use_beta, "use_beta", "true", "false");
}

void validate_rule(const ModelConfig& c, const Validator& check) {
  if (c.is_gated()) {
    check.require(c.rule != Rule::kRk2 && c.rule != Rule::kRk4, "rule",
                  "linear, euler, exact or exact_log for model_type \"" + c.model_type + "\"",
                  to_string(c.rule) + " (it has no form with a decay)");
  } else {
    check.require(c.rule != Rule::kExactLog, "rule", "linear, euler, rk2, rk4 or exact",
                  "exact_log (it needs a decay: model_type \"gated_efla\")");
  }
  if (is_flas(c)) validate_flas(c, check);
  check.require(!c.allow_neg_eigval ||
                    (c.rule == Rule::kEuler && c.beta_activation == BetaActivation::kSigmoid),
                "allow_neg_eigval", "false unless rule is euler and beta_activation is sigmoid",
                "true (the exact flow has no negative eigenvalues)");
  check.require(c.use_beta || c.beta_activation == BetaActivation::kSigmoid, "beta_activation",
                "absent when use_beta is false", to_string(c.beta_activation));
}

}  // namespace

namespace delta_family {

void read(FieldReader& reader, ModelConfig& c) {
  reader.read("rule", c.rule,
              {Rule::kLinear, Rule::kEuler, Rule::kRk2, Rule::kRk4, Rule::kExact, Rule::kExactLog});
  reader.read("beta_activation", c.beta_activation,
              {BetaActivation::kSigmoid, BetaActivation::kSoftplus, BetaActivation::kAdaptive});
  read_norms(reader, c);
  reader.read(
      "qk_activation", c.qk_activation,
      {QkActivation::kSilu, QkActivation::kRelu, QkActivation::kElu, QkActivation::kIdentity});
  reader.read("use_beta", c.use_beta);
  reader.read("allow_neg_eigval", c.allow_neg_eigval);
  reader.read("use_gate", c.use_gate);
  reader.read("use_short_conv", c.use_short_conv);
  reader.read("conv_size", c.conv_size);
  if (is_flas(c)) {
    reader.without_effect("use_output_norm", true);  // fla's layers have the norm whatever it says
  } else {
    reader.read("use_output_norm", c.use_output_norm);
  }
  reader.only("output_gate_activation", {"swish", "silu"}, "other gates are not implemented");
  reader.only("conv_bias", {false}, "convolutions have no bias");
  read_head_sizes(reader, c);
}

void write(const ModelConfig& c, json& object) {
  object.update({{"use_gate", c.use_gate},
                 {"use_short_conv", c.use_short_conv},
                 {"allow_neg_eigval", c.allow_neg_eigval},
                 {"conv_size", c.conv_size},
                 {"num_heads", c.num_heads},
                 {"expand_v", c.expand_v}});
  if (c.is_gated()) {
    object["head_dim"] = c.head_dim;
    object["num_v_heads"] = optional_json(c.num_v_heads);
  } else {
    object["expand_k"] = c.expand_k;
  }
  if (c.model_type != "gated_deltanet") {
    object.update({{"qk_norm", to_string(c.qk_norm)},
                   {"qk_activation", to_string(c.qk_activation)},
                   {"use_beta", c.use_beta},
                   {"use_output_norm", c.use_output_norm}});
  }
  if (!is_flas(c)) {
    object["conv_initializer_range"] = c.conv_initializer_range;
    object["rule"] = to_string(c.rule);
    object["beta_activation"] = to_string(c.beta_activation);
    if (c.q_norm) object["q_norm"] = to_string(*c.q_norm);
  }
  if (c.model_type == "delta_net") object["architectures"] = {"DeltaNetForCausalLM"};
  if (c.model_type == "gated_deltanet") object["architectures"] = {"GatedDeltaNetForCausalLM"};
  if (c.model_type == "efla") object["architectures"] = {"EflaForCausalLM"};
  if (c.model_type == "gated_efla") object["architectures"] = {"GatedEflaForCausalLM"};
}

void validate(const ModelConfig& c, const Validator& check) {
  c.is_gated() ? validate_gated_sizes(c, check) : validate_sizes(c, check);
  validate_rule(c, check);
}

int64_t mixer_parameters(const ModelConfig& c) {
  const int64_t d = c.hidden_size, key = c.key_size(), value = c.value_size();
  const int64_t heads = c.value_heads();
  int64_t count = 2 * d * key + 2 * d * value;  // q, k, v, o projections
  if (c.use_output_norm) count += c.head_value_size();
  if (c.use_beta) count += d * heads;
  if (c.beta_activation == BetaActivation::kAdaptive) count += heads;
  if (c.use_short_conv) count += (2 * key + value) * c.conv_size;
  if (c.use_gate) count += d * value;
  if (c.is_gated()) count += d * heads + 2 * heads;  // a_proj, A_log, dt_bias
  return count;
}

int64_t state_elements(const ModelConfig& c) {
  const int64_t recurrent = c.value_heads() * c.head_key_size() * c.head_value_size();
  const int64_t tails = c.use_short_conv ? (2 * c.key_size() + c.value_size()) * c.conv_size : 0;
  return recurrent + tails;
}

}  // namespace delta_family

int64_t ModelConfig::value_heads() const {
  return is_gated() ? num_v_heads.value_or(num_heads) : num_heads;
}

int64_t ModelConfig::key_size() const {
  return is_gated() ? num_heads * head_dim : scaled_size(hidden_size, expand_k);
}

int64_t ModelConfig::value_size() const {
  return is_gated() ? value_heads() * scaled_size(head_dim, expand_v)
                    : scaled_size(hidden_size, expand_v);
}

int64_t ModelConfig::head_key_size() const { return key_size() / num_heads; }
int64_t ModelConfig::head_value_size() const {
  return is_gated() ? scaled_size(head_dim, expand_v) : value_size() / num_heads;
}

}  // namespace efla
