#include "efla/nn/config.h"

#include <fmt/format.h>

#include <array>
#include <cmath>

#include "efla/io/error.h"

namespace efla {

namespace {

// The largest head size of the kernels.
constexpr int64_t kMaxHeadSize = 512;
constexpr int64_t kMaxConvSize = 64;
// Beyond every model that fits a machine of this field: a typing error, better said than allocated.
constexpr int64_t kMaxParameters = 1'000'000'000'000;
// int(x) of a product like 1024 * 0.75 must not fall short by a rounding error.
constexpr double kRoundingSlack = 1e-9;

int64_t scaled_size(int64_t size, double factor) {
  return static_cast<int64_t>(static_cast<double>(size) * factor + kRoundingSlack);
}

class Validator {
 public:
  explicit Validator(const std::string& where) : where_(where) {}

  void require(bool ok, std::string_view key, std::string_view expected,
               std::string_view found) const {
    if (!ok) {
      throw UsageError(fmt::format("{}: {} must be {}, not {}", where_, key, expected, found));
    }
  }
  void range(std::string_view key, int64_t value, int64_t low, int64_t high) const {
    require(value >= low && value <= high, key, fmt::format("an integer from {} to {}", low, high),
            std::to_string(value));
  }
  void positive(std::string_view key, double value, double high) const {
    require(value > 0 && value <= high, key, fmt::format("a number above 0 and at most {}", high),
            fmt::format("{}", value));
  }
  void token(std::string_view key, const std::optional<int64_t>& id, int64_t vocab_size) const {
    if (!id) return;
    require(*id >= 0 && *id < vocab_size, key,
            fmt::format("null or a token from 0 to {}", vocab_size - 1), std::to_string(*id));
  }

 private:
  const std::string& where_;
};

void validate_sizes(const ModelConfig& c, const Validator& check) {
  check.range("vocab_size", c.vocab_size, 1, 16'777'216);
  check.range("hidden_size", c.hidden_size, 1, 131'072);
  check.range("num_hidden_layers", c.num_hidden_layers, 1, 1024);
  check.range("num_heads", c.num_heads, 1, 4096);
  check.range("conv_size", c.conv_size, 1, kMaxConvSize);
  check.positive("expand_k", c.expand_k, 16);
  check.positive("expand_v", c.expand_v, 16);
  check.positive("hidden_ratio", c.hidden_ratio, 64);
  if (c.intermediate_size) check.range("intermediate_size", *c.intermediate_size, 1, 4'194'304);

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

  const int64_t total = c.parameter_count().total();
  check.require(total <= kMaxParameters, "the number of parameters",
                fmt::format("at most {}", kMaxParameters), std::to_string(total));
}

void validate_rule(const ModelConfig& c, const Validator& check) {
  check.require(c.model_type == "efla" || c.model_type == "delta_net", "model_type",
                "\"efla\" or \"delta_net\"", fmt::format("\"{}\"", c.model_type));
  check.require(c.rule != Rule::kExactLog, "rule", "linear, euler, rk2, rk4 or exact",
                "exact_log (it needs a decay, which this layer does not have)");
  if (c.model_type == "delta_net") {
    const std::string hint = " (use model_type \"efla\" for anything else)";
    check.require(c.rule == Rule::kEuler, "rule", "euler for model_type \"delta_net\"",
                  to_string(c.rule) + hint);
    check.require(c.beta_activation == BetaActivation::kSigmoid, "beta_activation",
                  "sigmoid for model_type \"delta_net\"", to_string(c.beta_activation) + hint);
    check.require(c.qk_norm == QkNorm::kL2, "qk_norm", "l2 for model_type \"delta_net\"",
                  to_string(c.qk_norm) + hint);
    check.require(!c.q_norm || *c.q_norm == c.qk_norm, "q_norm",
                  "absent for model_type \"delta_net\"",
                  c.q_norm ? to_string(*c.q_norm) + hint : hint);
  }
  check.require(!c.allow_neg_eigval ||
                    (c.rule == Rule::kEuler && c.beta_activation == BetaActivation::kSigmoid),
                "allow_neg_eigval", "false unless rule is euler and beta_activation is sigmoid",
                "true (the exact flow has no negative eigenvalues)");
  check.require(c.use_beta || c.beta_activation == BetaActivation::kSigmoid, "beta_activation",
                "absent when use_beta is false", to_string(c.beta_activation));
}

}  // namespace

ModelConfig ModelConfig::delta_net() {
  ModelConfig config;
  config.model_type = "delta_net";
  config.rule = Rule::kEuler;
  config.qk_norm = QkNorm::kL2;
  return config;
}

void ModelConfig::validate(const std::string& where) const {
  const Validator check(where);
  validate_sizes(*this, check);
  validate_rule(*this, check);
  check.positive("norm_eps", norm_eps, 1);
  check.positive("initializer_range", initializer_range, 10);
  check.require(conv_initializer_range >= 0 && conv_initializer_range <= 10,
                "conv_initializer_range", "a number from 0 (as initializer_range) to 10",
                fmt::format("{}", conv_initializer_range));
  check.range("max_position_embeddings", max_position_embeddings, 1, int64_t{1} << 40);
  check.token("bos_token_id", bos_token_id, vocab_size);
  check.token("eos_token_id", eos_token_id, vocab_size);
  check.token("pad_token_id", pad_token_id, vocab_size);
}

int64_t ModelConfig::key_size() const { return scaled_size(hidden_size, expand_k); }
int64_t ModelConfig::value_size() const { return scaled_size(hidden_size, expand_v); }
int64_t ModelConfig::head_key_size() const { return key_size() / num_heads; }
int64_t ModelConfig::head_value_size() const { return value_size() / num_heads; }

int64_t ModelConfig::mlp_size() const {
  if (intermediate_size) return *intermediate_size;
  constexpr int64_t kMultiple = 256;
  const int64_t size =
      static_cast<int64_t>(static_cast<double>(hidden_size) * hidden_ratio * 2 / 3);
  return (size + kMultiple - 1) / kMultiple * kMultiple;
}

ParameterCount ModelConfig::parameter_count() const {
  const int64_t d = hidden_size, key = key_size(), value = value_size();
  int64_t mixer =
      2 * d * key + 2 * d * value + head_value_size();  // q, k, v, o projections, o_norm
  if (use_beta) mixer += d * num_heads;
  if (beta_activation == BetaActivation::kAdaptive) mixer += num_heads;
  if (use_short_conv) mixer += (2 * key + value) * conv_size;
  if (use_gate) mixer += d * value;
  const int64_t block = mixer + 3 * d * mlp_size() + 2 * d;
  ParameterCount count;
  count.embedding = vocab_size * d;
  count.output_head = tie_word_embeddings ? 0 : vocab_size * d;
  count.other = num_hidden_layers * block + d;
  return count;
}

int64_t ModelConfig::state_elements() const {
  const int64_t recurrent = num_heads * head_key_size() * head_value_size();
  const int64_t tails = use_short_conv ? (2 * key_size() + value_size()) * conv_size : 0;
  return num_hidden_layers * (recurrent + tails);
}

std::string to_string(Rule rule) { return rule_name(rule); }

std::string to_string(BetaActivation activation) {
  constexpr std::array kNames = {"sigmoid", "softplus", "adaptive"};
  return kNames.at(static_cast<size_t>(activation));
}

std::string to_string(QkNorm norm) { return norm == QkNorm::kL2 ? "l2" : "none"; }

std::string to_string(QkActivation activation) {
  constexpr std::array kNames = {"silu", "relu", "elu", "identity"};
  return kNames.at(static_cast<size_t>(activation));
}

}  // namespace efla
