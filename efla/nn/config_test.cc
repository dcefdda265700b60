#include "efla/nn/config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "efla/io/error.h"

namespace efla {
namespace {

using nlohmann::json;

// The error of reading `object`, or "" when it is accepted.
std::string error_of(const json& object) {
  try {
    ModelConfig::from_json(object, "here/config.json");
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

// config.json of fla's published 1.3B DeltaNet, shortened to what differs from the defaults.
json published_delta_net() {
  return json::parse(R"({
    "architectures": ["DeltaNetForCausalLM"], "attn": null, "attn_mode": "chunk",
    "bos_token_id": 1, "conv_size": 4, "eos_token_id": 2, "expand_k": 1, "expand_v": 1,
    "fuse_cross_entropy": true, "hidden_act": "swish", "hidden_ratio": 4, "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": null, "max_position_embeddings": 2048,
    "model_type": "delta_net", "norm_eps": 1e-06, "num_heads": 16,
    "num_hidden_layers": 24, "pad_token_id": 2, "qk_activation": "silu", "qk_norm": "l2",
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.40.0",
    "use_beta": true, "use_cache": true, "use_gate": false, "use_output_norm": true,
    "use_short_conv": true, "vocab_size": 32000})");
}

TEST(ModelConfig, DefaultsAreFlas) {
  const ModelConfig config = ModelConfig::from_json({{"model_type", "delta_net"}});
  EXPECT_EQ(config.rule, Rule::kEuler);
  EXPECT_EQ(config.qk_norm, QkNorm::kL2);
  EXPECT_EQ(config.beta_activation, BetaActivation::kSigmoid);
  EXPECT_EQ(config.hidden_size, 2048);
  EXPECT_EQ(config.num_hidden_layers, 24);
  EXPECT_EQ(config.num_heads, 16);
  EXPECT_EQ(config.vocab_size, 32000);
  EXPECT_EQ(config.norm_eps, 1e-6);
  EXPECT_FALSE(config.tie_word_embeddings);
}

TEST(ModelConfig, EflaIsTheExactFlowOnRawKeys) {
  const ModelConfig config = ModelConfig::from_json({{"model_type", "efla"}});
  EXPECT_EQ(config.rule, Rule::kExact);
  EXPECT_EQ(config.qk_norm, QkNorm::kNone);
}

TEST(ModelConfig, PublishedSizes) {
  const ModelConfig large = ModelConfig::from_json(published_delta_net());
  EXPECT_EQ(large.parameter_count().total(), 1'365'677'056);
  EXPECT_EQ(large.head_key_size(), 128);
  EXPECT_EQ(large.mlp_size(), 5632);
  json small = published_delta_net();
  small.update({{"hidden_size", 1024}, {"num_heads", 8}});
  const ModelConfig config = ModelConfig::from_json(small);
  EXPECT_EQ(config.mlp_size(), 2816);
  const ParameterCount count = config.parameter_count();
  EXPECT_EQ(count.embedding, 32'768'000);
  EXPECT_EQ(count.output_head, 32'768'000);
  EXPECT_EQ(count.total(), 374'362'112);
}

TEST(ModelConfig, MlpSizeIsRoundedUpTo256) {
  ModelConfig config;
  config.hidden_size = 256;
  EXPECT_EQ(config.mlp_size(), 768);  // int(256 * 4 * 2/3) = 682
  config.hidden_size = 96;
  EXPECT_EQ(config.mlp_size(), 256);  // exactly 256 stays
  config.hidden_size = 97;
  EXPECT_EQ(config.mlp_size(), 512);
  config.intermediate_size = 100;
  EXPECT_EQ(config.mlp_size(), 100);
}

TEST(ModelConfig, StateOfOneLayerByHand) {
  ModelConfig config;
  config.vocab_size = 10;
  config.hidden_size = 8;
  config.num_hidden_layers = 1;
  config.num_heads = 2;
  config.intermediate_size = 5;
  EXPECT_EQ(config.state_elements(), 2 * 4 * 4 + 3 * 8 * 4);
}

TEST(ModelConfig, RoundTripKeepsEveryField) {
  ModelConfig config;
  config.beta_activation = BetaActivation::kAdaptive;
  config.rule = Rule::kRk4;
  config.qk_norm = QkNorm::kL2;
  config.q_norm = QkNorm::kNone;
  config.qk_activation = QkActivation::kElu;
  config.use_gate = true;
  config.use_short_conv = false;
  config.conv_size = 3;
  config.vocab_size = 1000;
  config.hidden_size = 384;
  config.num_hidden_layers = 5;
  config.num_heads = 6;
  config.expand_k = 0.5;
  config.expand_v = 2;
  config.hidden_ratio = 3.5;
  config.intermediate_size = 777;
  config.norm_eps = 1e-5;
  config.initializer_range = 0.006;
  config.conv_initializer_range = 0.25;
  config.tokenizer_fingerprint = "0123456789abcdef";
  config.tie_word_embeddings = true;
  config.max_position_embeddings = 4096;
  config.bos_token_id.reset();
  config.eos_token_id = 3;
  config.pad_token_id = 0;
  const json object = config.to_json();
  EXPECT_EQ(ModelConfig::from_json(json::parse(object.dump())).to_json(), object);
  // Each switch once more alone: to_json itself must not lose it.
  EXPECT_EQ(object["rule"], "rk4");
  EXPECT_EQ(object["beta_activation"], "adaptive");
  EXPECT_EQ(object["q_norm"], "none");
  EXPECT_EQ(object["qk_activation"], "elu");
  EXPECT_EQ(object["hidden_size"], 384);
  EXPECT_EQ(object["conv_initializer_range"], 0.25);
  EXPECT_EQ(object["tokenizer_fingerprint"], "0123456789abcdef");
  EXPECT_EQ(object["bos_token_id"], nullptr);
  EXPECT_EQ(object["tie_word_embeddings"], true);

  config = ModelConfig();
  config.use_beta = false;
  EXPECT_EQ(ModelConfig::from_json(config.to_json()).to_json(), config.to_json());
  config = ModelConfig::delta_net();
  config.allow_neg_eigval = true;
  const ModelConfig back = ModelConfig::from_json(config.to_json());
  EXPECT_TRUE(back.allow_neg_eigval);
  EXPECT_EQ(back.rule, Rule::kEuler);
  EXPECT_FALSE(config.to_json().contains("rule")) << "fla would not know it";
}

TEST(ModelConfig, BookkeepingAndSwitchedOffKeysAreAccepted) {
  ::testing::internal::CaptureStderr();
  for (const json& extra :
       {json{{"norm_first", true}}, json{{"_name_or_path", "x/y"}},
        json{{"attn_mode", "fused_recurrent"}}, json{{"some_feature", false}},
        json{{"some_feature", nullptr}}, json{{"hidden_act", "silu"}},
        json{{"hidden_ratio", nullptr}}, json{{"q_norm", nullptr}}, json{{"q_norm", "l2"}},
        json{{"rule", "euler"}}, json{{"use_output_norm", false}}}) {
    json object = published_delta_net();
    object.update(extra);
    EXPECT_EQ(error_of(object), "") << extra;
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  for (const char* key : {"norm_first", "_name_or_path", "some_feature", "use_output_norm"}) {
    EXPECT_NE(said.find(std::string("here/config.json: key ") + key), std::string::npos) << said;
  }
  for (const char* key : {"attn_mode", "architectures", "torch_dtype"}) {
    EXPECT_EQ(said.find(key), std::string::npos) << said;
  }
}

TEST(ModelConfig, RefusesWithTheKeyAndWhatIsExpected) {
  struct Case {
    json change;
    std::vector<std::string> said;
  };
  const std::vector<Case> cases = {
      {{{"model_type", "rwkv7"}},
       {"model_type must be one of efla, delta_net, gated_deltanet, gated_efla, mamba2, "
        "transformer",
        "rwkv7"}},
      {{{"model_type", 3}}, {"model_type must be a string", "3"}},
      {{{"hidden_size", "256"}}, {"hidden_size must be an integer", "\"256\""}},
      {{{"hidden_size", 256.5}}, {"hidden_size must be an integer", "256.5"}},
      {{{"hidden_size", -256}}, {"hidden_size must be an integer from 1", "-256"}},
      {{{"hidden_size", 0}}, {"hidden_size"}},
      {{{"hidden_size", 1000000000}}, {"hidden_size must be an integer from 1 to 131072"}},
      {{{"hidden_size", 18446744073709551615ull}}, {"hidden_size must be an integer"}},
      {{{"vocab_size", 0}}, {"vocab_size must be an integer from 1"}},
      {{{"vocab_size", nullptr}}, {"vocab_size must be an integer, not null"}},
      {{{"num_hidden_layers", 0}}, {"num_hidden_layers"}},
      {{{"num_hidden_layers", 100000}}, {"num_hidden_layers"}},
      {{{"num_heads", 3}}, {"num_heads must be a divisor of hidden_size * expand_k = 2048"}},
      {{{"num_heads", 2}}, {"num_heads must be at least 4", "512"}},
      {{{"expand_k", 1e-9}}, {"num_heads must be a divisor"}},
      {{{"expand_v", 0}}, {"expand_v must be a number above 0"}},
      {{{"expand_v", -1.0}}, {"expand_v"}},
      {{{"expand_v", true}}, {"expand_v must be a number, not true"}},
      {{{"conv_size", 0}}, {"conv_size must be an integer from 1 to 64"}},
      {{{"hidden_ratio", 1000}}, {"hidden_ratio"}},
      {{{"intermediate_size", -5}}, {"intermediate_size must be an integer from 1"}},
      {{{"norm_eps", 0}}, {"norm_eps must be a number above 0"}},
      {{{"initializer_range", -0.02}}, {"initializer_range"}},
      {{{"max_position_embeddings", 0}}, {"max_position_embeddings"}},
      {{{"bos_token_id", 32000}}, {"bos_token_id must be null or a token from 0 to 31999"}},
      {{{"eos_token_id", -1}}, {"eos_token_id must be null or a token"}},
      {{{"pad_token_id", "x"}}, {"pad_token_id must be an integer"}},
      {{{"use_gate", "yes"}}, {"use_gate must be true or false", "\"yes\""}},
      {{{"use_gate", 1}}, {"use_gate must be true or false"}},
      {{{"qk_norm", "cosine"}}, {"qk_norm must be one of none, l2, sum", "cosine"}},
      {{{"qk_norm", "none"}}, {"qk_norm must be l2 or sum for model_type \"delta_net\""}},
      {{{"q_norm", "none"}}, {"q_norm must be absent for model_type \"delta_net\""}},
      {{{"qk_activation", "gelu"}}, {"qk_activation must be one of silu, relu, elu, identity"}},
      {{{"rule", "exact"}}, {"rule must be euler for model_type \"delta_net\"", "efla"}},
      {{{"rule", "newton"}}, {"rule must be one of linear, euler, rk2, rk4, exact", "newton"}},
      {{{"beta_activation", "softplus"}}, {"beta_activation must be sigmoid"}},
      {{{"hidden_act", "gelu"}}, {"hidden_act must be \"swish\""}},
      {{{"attn", 3}}, {"attn must be null or an object", "3"}},
      {{{"attn", {{"layers", {1}}}}}, {"attn: num_heads must be given"}},
      {{{"attn", {{"num_heads", 16}}}}, {"attn: layers must be given"}},
      {{{"attn", {{"layers", {24}}, {"num_heads", 16}}}}, {"attn.layers", "from 0 to 23", "24"}},
      {{{"attn", {{"layers", {3, 3}}, {"num_heads", 16}}}}, {"attn.layers", "3 twice"}},
      {{{"attn", {{"layers", 1}, {"num_heads", 16}}}}, {"attn: layers must be an array"}},
      {{{"attn", {{"layers", {1}}, {"num_heads", 3}}}}, {"attn.num_heads must be a divisor"}},
      {{{"attn", {{"layers", {1}}, {"num_heads", 4}, {"num_kv_heads", 3}}}},
       {"attn.num_kv_heads must be a divisor of num_heads = 4"}},
      {{{"attn", {{"layers", {1}}, {"num_heads", 4}, {"window_size", 0}}}}, {"attn.window_size"}},
      {{{"attn", {{"layers", {1}}, {"num_heads", 4}, {"rope_scaling", 2}}}},
       {"attn: unknown key rope_scaling"}},
      {{{"attnres_block_size", 4}}, {"attnres_block_size must be null"}},
      {{{"use_l2warp", true}}, {"use_l2warp must be false"}},
      {{{"conv_bias", true}}, {"conv_bias must be false"}},
      {{{"decay_rank", 8}}, {"unknown key decay_rank = 8 may change the mathematics"}},
  };
  for (const Case& c : cases) {
    json object = published_delta_net();
    object.update(c.change);
    const std::string error = error_of(object);
    EXPECT_EQ(error.find("here/config.json: "), 0u) << c.change << " gave '" << error << "'";
    EXPECT_EQ(error.find('\n'), std::string::npos);
    for (const std::string& text : c.said) {
      EXPECT_NE(error.find(text), std::string::npos) << c.change << " gave '" << error << "'";
    }
  }
  EXPECT_NE(error_of(json::array({1})).find("must be a JSON object"), std::string::npos);
}

TEST(ModelConfig, RefusesCombinationsThatHaveNoMeaning) {
  const json efla = {{"model_type", "efla"}};
  const std::vector<std::pair<json, std::string>> cases = {
      {{{"allow_neg_eigval", true}}, "allow_neg_eigval must be false"},
      {{{"allow_neg_eigval", true}, {"rule", "euler"}, {"beta_activation", "softplus"}},
       "allow_neg_eigval must be false"},
      {{{"use_beta", false}, {"beta_activation", "adaptive"}}, "beta_activation must be absent"},
      {{{"rule", "exact_log"}}, "rule must be linear, euler, rk2, rk4 or exact"},
  };
  for (const auto& [change, said] : cases) {
    json object = efla;
    object.update(change);
    EXPECT_NE(error_of(object).find(said), std::string::npos) << error_of(object);
  }
  ModelConfig config;
  config.rule = Rule::kExactLog;
  EXPECT_THROW(config.validate(), UsageError);
  config = ModelConfig();
  config.hidden_size = 131072;
  config.num_heads = 256;
  config.num_hidden_layers = 1024;
  EXPECT_THROW(config.validate(), UsageError) << "more parameters than any machine holds";
}

// The sentence for a family's config with one change.
std::string error_of_family(const std::string& model_type, const json& change) {
  json object = {{"model_type", model_type}};
  object.update(change);
  return error_of(object);
}

TEST(ModelConfig, EveryFamilyRefusesSizesThatDoNotFit) {
  struct Case {
    std::string family;
    json change;
    std::string said;
  };
  const std::vector<Case> cases = {
      {"gated_deltanet", {{"head_dim", 513}}, "head_dim must be an integer from 1 to 512"},
      {"gated_deltanet",
       {{"expand_v", 2.5}},
       "expand_v must be such that head_dim * expand_v is at"},
      {"gated_deltanet", {{"expand_v", 0.33}}, "expand_v must be such that head_dim * expand_v ="},
      {"gated_deltanet", {{"num_v_heads", 7}}, "num_v_heads must be a multiple of num_heads = 6"},
      {"gated_deltanet", {{"num_v_heads", 3}}, "num_v_heads must be a multiple of num_heads = 6"},
      {"gated_deltanet", {{"num_heads", 0}}, "num_heads must be an integer from 1"},
      {"gated_deltanet", {{"qk_norm", "sum"}}, "qk_norm must be l2 for model_type"},
      {"gated_deltanet", {{"qk_activation", "elu"}}, "qk_activation must be silu for model_type"},
      {"gated_deltanet", {{"rule", "exact"}}, "(use model_type \"gated_efla\" for anything else)"},
      {"gated_deltanet", {{"output_gate_activation", "sigmoid"}}, "output_gate_activation must be"},
      {"gated_efla", {{"rule", "rk4"}}, "rule must be linear, euler, exact or exact_log"},
      {"gated_efla", {{"allow_neg_eigval", true}}, "allow_neg_eigval must be false"},
      {"mamba2", {{"head_dim", 60}}, "head_dim must be a divisor of hidden_size * expand = 4096"},
      {"mamba2", {{"n_groups", 3}}, "n_groups must be a divisor of the 64 heads"},
      {"mamba2", {{"n_groups", 0}}, "n_groups must be a divisor"},
      {"mamba2", {{"head_dim", 0}}, "head_dim must be an integer from 1"},
      {"mamba2", {{"expand", 1e300}, {"num_heads", 4}}, "expand must be a number above 0"},
      {"mamba2", {{"num_heads", 63}}, "num_heads must be hidden_size * expand / head_dim = 64"},
      {"mamba2", {{"state_size", 1024}}, "state_size must be an integer from 1 to 512"},
      {"mamba2", {{"dt_limit", {0.5, 0.1}}}, "dt_limit must be [low, high]"},
      {"mamba2", {{"dt_limit", 3}}, "dt_limit must be an array of two numbers"},
      {"mamba2", {{"dt_limit", {0, {{"__float__", "NaN"}}}}}, "dt_limit must be an array of two"},
      {"mamba2", {{"A_init_range", {0, 16}}}, "A_init_range must be [low, high]"},
      {"mamba2", {{"dt_min", 1.0}}, "dt_min must be above 0 and at most dt_max"},
      {"mamba2", {{"D_has_hdim", true}}, "D_has_hdim must be false"},
      {"mamba2", {{"attn", {{"layers", {1}}}}}, "attn must be null"},
      {"mamba2", {{"hidden_act", "gelu"}}, "hidden_act must be"},
      {"transformer", {{"num_heads", 7}}, "num_heads must be a divisor of hidden_size = 2048"},
      {"transformer", {{"num_heads", 2048}}, "num_heads must be a divisor of hidden_size = 2048"},
      {"transformer", {{"num_kv_heads", 5}}, "num_kv_heads must be a divisor of num_heads = 32"},
      {"transformer", {{"rope_theta", 0}}, "rope_theta must be a number above 0"},
      {"transformer", {{"rope_theta", nullptr}}, "rope_theta must be a number, not null"},
      {"transformer", {{"window_size", -1}}, "window_size must be an integer from 1"},
      {"transformer", {{"elementwise_affine", false}}, "elementwise_affine must be true"},
      {"transformer", {{"expand_v", 2}}, "unknown key expand_v = 2 may change the mathematics"},
  };
  for (const Case& c : cases) {
    const std::string error = error_of_family(c.family, c.change);
    EXPECT_EQ(error.find("here/config.json: "), 0u) << c.family << c.change << " gave " << error;
    EXPECT_NE(error.find(c.said), std::string::npos) << c.family << c.change << " gave " << error;
    EXPECT_EQ(error.find('\n'), std::string::npos);
  }
}

// config.json as fla 0.6 writes it: what we write back has the same value under every key, and what
// we leave out is book-keeping.
TEST(ModelConfig, FlasFilesOfEveryFamilyRoundTrip) {
  const std::set<std::string> bookkeeping = {"attn_mode",
                                             "attnres_block_size",
                                             "chunk_size",
                                             "conv_init",
                                             "D_has_hdim",
                                             "dtype",
                                             "fuse_norm",
                                             "fuse_cross_entropy",
                                             "fuse_linear_cross_entropy",
                                             "use_cache",
                                             "fuse_swiglu",
                                             "transformers_version",
                                             "use_l2warp",
                                             "output_gate_activation",
                                             "elementwise_affine"};
  for (const char* family : {"delta_net", "gated_deltanet", "mamba2", "transformer"}) {
    const auto path = std::filesystem::path(EFLA_GOLDEN_DIR) / family / "config.json";
    std::ifstream file(path);
    const json original = json::parse(file);
    std::vector<std::string> skipped;
    const ModelConfig config = ModelConfig::from_json_file(path, &skipped);
    EXPECT_TRUE(skipped.empty()) << family << ::testing::PrintToString(skipped);
    const json written = config.to_json();
    for (const auto& [key, value] : original.items()) {
      if (written.contains(key)) {
        EXPECT_EQ(written[key], value) << family << ": " << key;
      } else {
        EXPECT_TRUE(bookkeeping.count(key)) << family << ": " << key;
      }
    }
    for (const auto& [key, value] : written.items()) {
      const bool harmless = key == "max_position_embeddings";  // which fla's Mamba-2 lacks
      EXPECT_TRUE(original.contains(key) || harmless) << family << ": fla would not know " << key;
    }
    EXPECT_EQ(ModelConfig::from_json(written).to_json(), written) << family;
  }
}

TEST(ModelConfig, EveryFamilysDefaultsAreFlas) {
  const ModelConfig gated = ModelConfig::from_json({{"model_type", "gated_deltanet"}});
  EXPECT_EQ(gated.num_heads, 6);
  EXPECT_EQ(gated.head_key_size(), 256);
  EXPECT_EQ(gated.head_value_size(), 512);
  EXPECT_EQ(gated.value_size(), 3072);
  EXPECT_EQ(gated.num_hidden_layers, 21);
  EXPECT_TRUE(gated.use_gate);
  EXPECT_EQ(gated.rule, Rule::kEuler);
  const ModelConfig mamba2 = ModelConfig::from_json({{"model_type", "mamba2"}});
  EXPECT_EQ(mamba2.num_hidden_layers, 48);
  EXPECT_EQ(mamba2.mamba2_heads(), 64);
  EXPECT_EQ(mamba2.mamba2_conv_size(), 4096 + 256);
  EXPECT_EQ(mamba2.norm_eps, 1e-5);
  EXPECT_EQ(mamba2.pad_token_id, 0);
  EXPECT_TRUE(std::isinf(mamba2.mamba2.dt_limit_high));
  const ModelConfig softmax = ModelConfig::from_json({{"model_type", "transformer"}});
  EXPECT_EQ(softmax.attn->num_heads, 32);
  EXPECT_EQ(softmax.attn->kv_heads(), 32);
  EXPECT_EQ(softmax.attn->rope_theta, 10000.0);
}

TEST(ModelConfig, FieldsOfTheOtherFamiliesRoundTrip) {
  ModelConfig gated = ModelConfig::of_type("gated_efla");
  gated.rule = Rule::kExactLog;
  gated.num_v_heads = 12;
  gated.head_dim = 64;
  gated.expand_v = 1.5;
  gated.use_output_norm = false;
  gated.attn = AttentionConfig();
  gated.attn->layers = {3, 7};
  gated.attn->num_heads = 16;
  gated.attn->num_kv_heads = 4;
  gated.attn->window_size = 128;
  gated.attn->rope_theta = 5e5;
  gated.attn->qkv_bias = true;
  ModelConfig mamba2 = ModelConfig::of_type("mamba2");
  mamba2.mamba2 = {.head_dim = 32,
                   .state_size = 64,
                   .expand = 3,
                   .n_groups = 4,
                   .conv_kernel = 3,
                   .use_bias = true,
                   .use_conv_bias = false,
                   .rmsnorm = false,
                   .norm_before_gate = true,
                   .residual_in_fp32 = false,
                   .dt_limit_low = 0.01,
                   .dt_limit_high = 0.2,
                   .a_init_low = 2,
                   .a_init_high = 8,
                   .dt_min = 0.002,
                   .dt_max = 0.05,
                   .dt_init_floor = 0.003,
                   .rescale_prenorm_residual = false};
  mamba2.conv_initializer_range = 0.2;
  ModelConfig softmax = ModelConfig::of_type("transformer");
  softmax.attn->num_kv_heads = 8;
  softmax.attn->window_size = 64;
  softmax.attn->qk_norm = true;
  softmax.attn->qkv_bias = true;
  for (const ModelConfig& config : {gated, mamba2, softmax}) {
    const json object = config.to_json();
    const ModelConfig back = ModelConfig::from_json(json::parse(object.dump()));
    EXPECT_EQ(back.to_json(), object);
    const json standard = ModelConfig::of_type(config.model_type).to_json();
    EXPECT_NE(standard, object);
  }
  const ModelConfig back = ModelConfig::from_json(mamba2.to_json());
  EXPECT_EQ(back.mamba2.dt_limit_high, 0.2);
  EXPECT_EQ(back.mamba2.a_init_high, 8);
  EXPECT_EQ(back.mamba2_heads(), 192);
  EXPECT_FALSE(back.mamba2.rmsnorm);
  EXPECT_EQ(ModelConfig::from_json(gated.to_json()).attn->layers, (std::vector<int64_t>{3, 7}));
  EXPECT_EQ(ModelConfig::from_json(gated.to_json()).mixer_kind(3), MixerKind::kAttention);
  EXPECT_EQ(ModelConfig::from_json(gated.to_json()).mixer_kind(4), MixerKind::kDelta);
}

// flame's json files still have them.
TEST(ModelConfig, Mamba2sOlderNamesAreRead) {
  const ModelConfig config = ModelConfig::from_json({{"model_type", "mamba2"},
                                                     {"time_step_min", 0.002},
                                                     {"time_step_max", 0.2},
                                                     {"time_step_floor", 0.0005},
                                                     {"time_step_limit", {0.0, 3.0}},
                                                     {"rms_norm", false}});
  EXPECT_EQ(config.mamba2.dt_min, 0.002);
  EXPECT_EQ(config.mamba2.dt_max, 0.2);
  EXPECT_EQ(config.mamba2.dt_init_floor, 0.0005);
  EXPECT_EQ(config.mamba2.dt_limit_high, 3.0);
  EXPECT_FALSE(config.mamba2.rmsnorm);
}

TEST(ModelConfig, FilesThatAreNotConfigsAreNamed) {
  const auto folder = std::filesystem::path(::testing::TempDir()) / "efla_config_test";
  std::filesystem::create_directories(folder);
  const auto path = folder / "config.json";
  const auto error = [&] {
    try {
      ModelConfig::from_json_file(path);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_NE(error().find("cannot be opened"), std::string::npos);
  for (const char* text : {"", "{\"hidden_size\": ", "\xff\xfe", "{\"a\": 1e999}"}) {
    std::ofstream(path) << text;
    EXPECT_NE(error().find(path.string()), std::string::npos) << text;
    EXPECT_NE(error().find("not valid JSON"), std::string::npos) << error();
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace efla
