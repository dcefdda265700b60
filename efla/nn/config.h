// The model's configuration: the fields of fla's DeltaNetConfig with their names and defaults, plus
// what EFLA adds (rule, beta_activation, q_norm). docs/mathematics.md, "The layer".
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "efla/flow/step_rule.h"

namespace efla {

/// From the beta projection z to beta (per token and head).
enum class BetaActivation {
  kSigmoid,   // sigmoid(z): in (0, 1)
  kSoftplus,  // softplus(z): unbounded above ("loose beta")
  kAdaptive,  // softplus(a) * sigmoid(z), a learned per head and initialised to softplus(a) = 1
};

/// Normalisation of queries or keys before the recurrence.
enum class QkNorm {
  kNone,
  kL2,  // x * rsqrt(sum x^2 + 1e-6) per head
};

/// Activation of queries and keys after the convolution (values always take SiLU).
enum class QkActivation {
  kSilu,
  kRelu,
  kElu,  // elu(x) + 1
  kIdentity,
};

/// Exact numbers of parameters.
struct ParameterCount {
  int64_t embedding = 0;    // the input embedding table
  int64_t output_head = 0;  // lm_head; 0 when tied to the embeddings
  int64_t other = 0;        // everything between
  int64_t total() const { return embedding + output_head + other; }
};

/// One model. Plain data: fill in the fields (or from_json), then validate().
struct ModelConfig {
  std::string model_type = "efla";  // "efla", or "delta_net" as fla writes it

  // What sets the systems apart. efla: exact flow on raw keys; delta_net: Euler step on unit keys.
  Rule rule = Rule::kExact;  // euler, rk2, rk4 or exact: the rules without decay
  BetaActivation beta_activation = BetaActivation::kSigmoid;
  QkNorm qk_norm = QkNorm::kNone;
  std::optional<QkNorm> q_norm;  // queries only; absent: as qk_norm
  QkActivation qk_activation = QkActivation::kSilu;
  bool use_beta = true;           // false: beta = 1
  bool allow_neg_eigval = false;  // beta in (0, 2); euler with sigmoid only
  bool use_gate = false;          // output gate silu(g_proj x)
  bool use_short_conv = true;
  int64_t conv_size = 4;

  // Sizes. Head sizes are hidden_size * expand / num_heads.
  int64_t vocab_size = 32000;
  int64_t hidden_size = 2048;
  int64_t num_hidden_layers = 24;
  int64_t num_heads = 16;
  double expand_k = 1.0;
  double expand_v = 1.0;
  double hidden_ratio = 4.0;
  std::optional<int64_t> intermediate_size;  // absent: from hidden_ratio, see mlp_size()

  double norm_eps = 1e-6;
  double initializer_range = 0.02;
  // Standard deviation of the short convolutions' initial weights; 0: initializer_range, as in fla.
  // Raw keys want more: with 0.02 they start at |k|^2 of about 0.002 (256 wide, 4 heads) and the
  // output norm's epsilon mutes the mixer; with 0.3 at about 0.6.
  double conv_initializer_range = 0;
  bool tie_word_embeddings = false;
  int64_t max_position_embeddings = 2048;  // no limit of the model: the window evaluations use
  std::optional<int64_t> bos_token_id = 1;
  std::optional<int64_t> eos_token_id = 2;
  std::optional<int64_t> pad_token_id;
  std::string tokenizer_fingerprint;  // Tokenizer::fingerprint() of the training text; "": unknown

  /// A DeltaNet with fla's defaults: rule euler, l2-normalised queries and keys.
  static ModelConfig delta_net();

  /// Reads fla's config.json or ours and validates it. Keys that cannot change the mathematics are
  /// skipped with a warning; any other unknown key, a wrong type or an absurd value throws
  /// UsageError naming the key and what is expected. `where` (a path) leads the message.
  /// With `skipped` there are no warnings and it receives those keys.
  static ModelConfig from_json(const nlohmann::json& json, const std::string& where = "config",
                               std::vector<std::string>* skipped = nullptr);
  static ModelConfig from_json_file(const std::filesystem::path& path,
                                    std::vector<std::string>* skipped = nullptr);
  nlohmann::json to_json() const;

  /// Throws UsageError naming the first key with a value that no model can have.
  void validate(const std::string& where = "config") const;

  // Derived sizes; of a validated config.
  int64_t key_size() const;         // H * K: hidden_size * expand_k
  int64_t value_size() const;       // H * V: hidden_size * expand_v
  int64_t head_key_size() const;    // K
  int64_t head_value_size() const;  // V
  int64_t mlp_size() const;  // intermediate_size, or int(hidden * ratio * 2/3) rounded up to 256

  ParameterCount parameter_count() const;
  /// Numbers that one sequence carries through decoding (recurrent states and convolution tails).
  int64_t state_elements() const;
};

/// The names used in configs and recipes ("exact", "softplus", "l2", ...).
std::string to_string(Rule rule);
std::string to_string(BetaActivation activation);
std::string to_string(QkNorm norm);
std::string to_string(QkActivation activation);

}  // namespace efla
