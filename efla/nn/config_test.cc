#include "efla/nn/config.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
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
  for (const json& extra : {json{{"norm_first", true}}, json{{"_name_or_path", "x/y"}},
                            json{{"attn_mode", "fused_recurrent"}}, json{{"some_feature", false}},
                            json{{"some_feature", nullptr}}, json{{"hidden_act", "silu"}},
                            json{{"hidden_ratio", nullptr}}, json{{"q_norm", nullptr}},
                            json{{"q_norm", "l2"}}, json{{"rule", "euler"}}}) {
    json object = published_delta_net();
    object.update(extra);
    EXPECT_EQ(error_of(object), "") << extra;
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  for (const char* key : {"norm_first", "_name_or_path", "some_feature"}) {
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
      {{{"model_type", "mamba2"}}, {"model_type must be \"efla\" or \"delta_net\"", "mamba2"}},
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
      {{{"qk_norm", "sum"}}, {"qk_norm must be one of none, l2", "sum"}},
      {{{"qk_norm", "none"}}, {"qk_norm must be l2 for model_type \"delta_net\""}},
      {{{"q_norm", "none"}}, {"q_norm must be absent for model_type \"delta_net\""}},
      {{{"qk_activation", "gelu"}}, {"qk_activation must be one of silu, relu, elu, identity"}},
      {{{"rule", "exact"}}, {"rule must be euler for model_type \"delta_net\"", "efla"}},
      {{{"rule", "newton"}}, {"rule must be one of linear, euler, rk2, rk4, exact", "newton"}},
      {{{"beta_activation", "softplus"}}, {"beta_activation must be sigmoid"}},
      {{{"use_output_norm", false}}, {"use_output_norm must be true"}},
      {{{"hidden_act", "gelu"}}, {"hidden_act must be \"swish\""}},
      {{{"attn", {{"layers", {1}}}}}, {"attn must be null", "hybrid"}},
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
      {{{"rule", "exact_log"}}, "rule must be one of"},
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
