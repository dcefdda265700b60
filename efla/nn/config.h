// The model's configuration: fla's fields with fla's names and defaults for every family, plus what
// EFLA adds (rule, beta_activation, q_norm). docs/models.md lists the families.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "efla/flow/step_rule.h"

namespace efla {

/// What stands in the mixer's place of a layer.
enum class MixerKind {
  kDelta,      // efla, delta_net, gated_deltanet, gated_efla: DeltaNetMixer
  kMamba2,     // Mamba2Mixer
  kAttention,  // softmax attention: every layer of a transformer, some layers of a hybrid
};

/// From the beta projection z to beta (per token and head).
enum class BetaActivation {
  kSigmoid,   // sigmoid(z): in (0, 1)
  kSoftplus,  // softplus(z): unbounded above ("loose beta")
  kAdaptive,  // softplus(a) * sigmoid(z), a learned per head and initialised to softplus(a) = 1
};

/// Normalisation of queries or keys before the recurrence.
enum class QkNorm {
  kNone,
  kL2,   // x * rsqrt(sum x^2 + 1e-6) per head
  kSum,  // x / sum x per head; for activations that give positive numbers
};

/// Activation of queries and keys after the convolution (values always take SiLU).
enum class QkActivation {
  kSilu,
  kRelu,
  kElu,  // elu(x) + 1
  kIdentity,
};

/// Softmax attention with rotary positions: a transformer's layers, or fla's `attn` field, which
/// makes some layers of another family softmax layers. Head size: hidden_size / num_heads.
struct AttentionConfig {
  std::vector<int64_t> layers;  // hybrids: which layers; a transformer leaves it empty (all)
  int64_t num_heads = 32;
  std::optional<int64_t> num_kv_heads;  // absent: num_heads; a divisor of num_heads
  std::optional<int64_t> window_size;  // a token sees itself and window_size - 1 before it; absent:
                                       // everything before it
  double rope_theta = 10000.0;
  bool qkv_bias = false;
  bool qk_norm = false;  // RMS norm of each head of q and k, before the rotation; transformers only

  int64_t kv_heads() const { return num_kv_heads.value_or(num_heads); }
};

/// The Mamba-2 block. num_heads = hidden_size * expand / head_dim is derived.
struct Mamba2Config {
  int64_t head_dim = 64;     // V: channels of x in a head
  int64_t state_size = 128;  // K: length of B and C
  double expand = 2;         // d_inner = hidden_size * expand
  int64_t n_groups = 1;      // key heads: B and C are shared by num_heads / n_groups heads
  int64_t conv_kernel = 4;   // over x, B and C together
  bool use_bias = false;     // of in_proj and out_proj
  bool use_conv_bias = true;
  bool rmsnorm = true;            // the gated norm before out_proj; false: y * silu(z) alone
  bool norm_before_gate = false;  // false: norm(y * silu(z)); true: norm(y) * silu(z)
  bool residual_in_fp32 = true;
  // dt = softplus(. + dt_bias) is clamped to this range; the upper end may be infinite.
  double dt_limit_low = 0;
  double dt_limit_high = std::numeric_limits<double>::infinity();
  // First values: A ~ U(range), dt log-uniform in [dt_min, dt_max] and at least dt_init_floor,
  // out_proj divided by sqrt(num_hidden_layers).
  double a_init_low = 1, a_init_high = 16;
  double dt_min = 0.001, dt_max = 0.1, dt_init_floor = 1e-4;
  bool rescale_prenorm_residual = true;
};

/// Exact numbers of parameters.
struct ParameterCount {
  int64_t embedding = 0;    // the input embedding table
  int64_t output_head = 0;  // lm_head; 0 when tied to the embeddings
  int64_t other = 0;        // everything between
  int64_t total() const { return embedding + output_head + other; }
};

/// One model. Plain data: start from of_type(), fill in the fields (or from_json), then validate().
struct ModelConfig {
  // "efla", "delta_net", "gated_deltanet", "gated_efla", "mamba2" or "transformer".
  std::string model_type = "efla";

  // --- The delta-rule families: efla, delta_net, gated_deltanet, gated_efla ---------------------
  // What sets them apart. efla: exact flow on raw keys; delta_net: Euler step on unit keys.
  // gated_*: the same with a decay of the state, log a = -exp(A_log) softplus(a_proj x + dt_bias);
  // gated_efla reads it by its rule: exact (a is a rate, the paper's appendix D) or exact_log (log
  // a is the decay itself).
  Rule rule = Rule::kExact;
  BetaActivation beta_activation = BetaActivation::kSigmoid;
  QkNorm qk_norm = QkNorm::kNone;
  std::optional<QkNorm> q_norm;  // queries only; absent: as qk_norm
  QkActivation qk_activation = QkActivation::kSilu;
  bool use_beta = true;           // false: beta = 1
  bool allow_neg_eigval = false;  // beta in (0, 2); euler with sigmoid only
  bool use_gate = false;          // output gate silu(g_proj x)
  bool use_output_norm = true;    // RMS norm of every head's output
  bool use_short_conv = true;
  int64_t conv_size = 4;
  int64_t num_heads = 16;  // of queries and keys
  // Head sizes of efla and delta_net are hidden_size * expand / num_heads. The gated families give
  // the key size of a head as head_dim; their values have head_dim * expand_v and num_v_heads
  // heads.
  double expand_k = 1.0;
  double expand_v = 1.0;
  int64_t head_dim = 256;              // gated families only
  std::optional<int64_t> num_v_heads;  // gated families only; absent: num_heads; a multiple of it

  // --- The other families, and hybrids ----------------------------------------------------------
  Mamba2Config mamba2;                  // of model_type "mamba2"
  std::optional<AttentionConfig> attn;  // transformer: always; delta-rule families: a hybrid

  // --- Every family -----------------------------------------------------------------------------
  int64_t vocab_size = 32000;
  int64_t hidden_size = 2048;
  int64_t num_hidden_layers = 24;
  double hidden_ratio = 4.0;                 // mamba2 has no MLP
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

  /// The defaults of a family (fla's for fla's families). Throws UsageError for an unknown one.
  static ModelConfig of_type(const std::string& model_type, const std::string& where = "config");
  /// A DeltaNet with fla's defaults: rule euler, l2-normalised queries and keys.
  static ModelConfig delta_net() { return of_type("delta_net"); }

  /// Reads fla's config.json or ours and validates it. Keys that cannot change the mathematics are
  /// skipped with a warning; any other unknown key, a wrong type or an absurd value throws
  /// UsageError naming the key and what is expected. `where` (a path) leads the message.
  /// With `skipped` there are no warnings and it receives those keys.
  static ModelConfig from_json(const nlohmann::json& json, const std::string& where = "config",
                               std::vector<std::string>* skipped = nullptr);
  static ModelConfig from_json_file(const std::filesystem::path& path,
                                    std::vector<std::string>* skipped = nullptr);
  /// The keys of the family alone, so that fla reads what it knows.
  nlohmann::json to_json() const;

  /// Throws UsageError naming the first key with a value that no model can have.
  void validate(const std::string& where = "config") const;

  // Of a validated config.
  MixerKind mixer_kind(int64_t layer) const;
  bool is_gated() const;  // gated_deltanet or gated_efla: the state decays
  bool has_mlp() const;   // false: the blocks are mixers alone (mamba2)

  // Derived sizes of the delta-rule families.
  int64_t value_heads() const;      // HV
  int64_t key_size() const;         // H * K
  int64_t value_size() const;       // HV * V
  int64_t head_key_size() const;    // K
  int64_t head_value_size() const;  // V
  int64_t mlp_size() const;  // intermediate_size, or int(hidden * ratio * 2/3) rounded up to 256
  // Of Mamba-2.
  int64_t mamba2_inner_size() const;  // hidden_size * expand: channels of x and z
  int64_t mamba2_heads() const;       // HV
  int64_t mamba2_conv_size() const;   // channels of the convolution: x, B and C

  ParameterCount parameter_count() const;
  /// Numbers that one sequence carries through decoding whatever its length: recurrent states and
  /// convolution tails.
  int64_t state_elements() const;
  /// Numbers that every token (of the window, where there is one) adds: keys and values of softmax
  /// layers.
  int64_t state_elements_per_token() const;
};

/// The names of all families.
const std::vector<std::string>& model_types();

/// The names used in configs and recipes ("exact", "softplus", "l2", ...).
std::string to_string(Rule rule);
std::string to_string(BetaActivation activation);
std::string to_string(QkNorm norm);
std::string to_string(QkActivation activation);

}  // namespace efla
