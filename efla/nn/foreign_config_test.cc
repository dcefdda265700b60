#include "efla/nn/foreign_config.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "efla/io/error.h"
#include "efla/nn/config_text.h"

namespace efla {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

#define EXPECT_MENTIONS(message, part) \
  EXPECT_NE((message).find(part), std::string::npos) << "message: " << (message)

// config.json of state-spaces/mamba2-130m.
json mamba2_130m() {
  return json::parse(R"({"d_model": 768, "d_intermediate": 0, "n_layer": 24, "vocab_size": 50277,
    "ssm_cfg": {"layer": "Mamba2"}, "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": true,
    "residual_in_fp32": true, "fused_add_norm": true, "pad_vocab_size_multiple": 16,
    "tie_embeddings": true})");
}

ModelConfig read(const json& object, LoadReport& report) {
  std::vector<std::string> skipped;
  return ModelConfig::from_json(to_fla_config(object, "c.json", report), "c.json", &skipped);
}

std::string refusal(const json& object) {
  LoadReport report;
  const std::string message = error_of([&] { read(object, report); });
  EXPECT_EQ(message.find("c.json"), 0u) << message;
  return message;
}

TEST(ConfigText, PythonsNumbersAreRead) {
  const json parsed = parse_config_text(
      R"({"a": Infinity, "b": [-Infinity, NaN], "c": "Infinity \" NaN", "d": 1})", "c.json");
  EXPECT_EQ(parsed["a"]["__float__"], "Infinity");
  EXPECT_EQ(parsed["b"][0]["__float__"], "-Infinity");
  EXPECT_EQ(parsed["b"][1]["__float__"], "NaN");
  EXPECT_EQ(parsed["c"], "Infinity \" NaN");
  EXPECT_EQ(parsed["d"], 1);
}

TEST(ConfigText, HostileTextIsRefusedInOneSentence) {
  const auto refused = [](const std::string& text) {
    const std::string message = error_of([&] { parse_config_text(text, "c.json"); });
    EXPECT_EQ(message.find("c.json: "), 0u) << message;
    EXPECT_LT(message.size(), 400u);
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    return message;
  };
  EXPECT_MENTIONS(refused(""), "not valid JSON");
  EXPECT_MENTIONS(refused("{\"a\": }"), "not valid JSON");
  EXPECT_MENTIONS(refused("{\"a\": \"\xff\"}"), "not valid JSON");
  EXPECT_MENTIONS(refused(std::string(100'000, '[')), "32 levels");
  EXPECT_MENTIONS(refused("{\"x\": " + std::string(100'000, '{')), "32 levels");
  EXPECT_MENTIONS(refused(std::string(2'000'000, ' ')), "2000000 bytes");
  EXPECT_MENTIONS(refused(R"({"a": 1, "b": {"a": 2}, "a": 3})"), "\"a\" twice");
  EXPECT_MENTIONS(refused(R"({"a\nb": 1})"), "no name: \"a\\nb\"");
  EXPECT_MENTIONS(refused("{\"" + std::string(5000, 'x') + "\": 1}"), "xxx...");
  EXPECT_EQ(parse_config_text(R"({"a": 1, "b": {"a": 2}})", "c.json")["b"]["a"], 2);
}

TEST(StateSpaces, Mamba2Of130MillionParameters) {
  LoadReport report;
  const ModelConfig config = read(mamba2_130m(), report);
  EXPECT_EQ(report.format, "state-spaces");
  EXPECT_EQ(report.ignored, std::vector<std::string>{"fused_add_norm"});
  ASSERT_EQ(report.notes.size(), 1u);
  EXPECT_MENTIONS(report.notes[0], "50277 is padded to 50288");
  EXPECT_EQ(config.model_type, "mamba2");
  EXPECT_EQ(config.vocab_size, 50288);
  EXPECT_EQ(config.mamba2_heads(), 24);
  EXPECT_EQ(config.mamba2.state_size, 128);
  EXPECT_EQ(config.norm_eps, 1e-5);
  EXPECT_TRUE(config.tie_word_embeddings);
  // Per layer: in_proj 768 x (2 * 1536 + 2 * 128 + 24), conv (1536 + 256) x (4 + 1), A_log, D and
  // dt_bias of 24, the norms of 1536 and 768, out_proj 1536 x 768.
  const int64_t layer = 768 * 3352 + 1792 * 5 + 3 * 24 + 1536 + 768 + 1536 * 768;
  EXPECT_EQ(config.parameter_count().total(), 50288 * 768 + 24 * layer + 768);
}

TEST(StateSpaces, EveryFieldOfTheMixerIsRead) {
  json object = mamba2_130m();
  object["ssm_cfg"] = {{"layer", "Mamba2"},
                       {"d_state", 64},
                       {"headdim", 32},
                       {"ngroups", 4},
                       {"d_conv", 3},
                       {"expand", 1},
                       {"bias", true},
                       {"conv_bias", false},
                       {"norm_before_gate", true},
                       {"rmsnorm", true},
                       {"dt_limit", {0.001, 0.5}},
                       {"chunk_size", 64}};
  object["tie_embeddings"] = false;
  object["residual_in_fp32"] = false;
  LoadReport report;
  const ModelConfig config = read(object, report);
  EXPECT_EQ(config.mamba2.state_size, 64);
  EXPECT_EQ(config.mamba2.head_dim, 32);
  EXPECT_EQ(config.mamba2.n_groups, 4);
  EXPECT_EQ(config.mamba2.conv_kernel, 3);
  EXPECT_EQ(config.mamba2.expand, 1);
  EXPECT_TRUE(config.mamba2.use_bias);
  EXPECT_FALSE(config.mamba2.use_conv_bias);
  EXPECT_TRUE(config.mamba2.norm_before_gate);
  EXPECT_EQ(config.mamba2.dt_limit_low, 0.001);
  EXPECT_EQ(config.mamba2.dt_limit_high, 0.5);
  EXPECT_FALSE(config.tie_word_embeddings);
  EXPECT_FALSE(config.mamba2.residual_in_fp32);
  // And back: the same model in their fields.
  LoadReport again;
  EXPECT_EQ(read(to_state_spaces_config(config), again).to_json(), config.to_json());
  EXPECT_TRUE(again.notes.empty());
}

TEST(StateSpaces, WhatIsNotMamba2IsRefused) {
  const auto with = [](const char* key, const json& value) {
    json object = mamba2_130m();
    object[key] = value;
    return refusal(object);
  };
  EXPECT_MENTIONS(with("ssm_cfg", json::object()), "\"Mamba1\"");
  EXPECT_MENTIONS(with("ssm_cfg", {{"layer", "Mamba1"}}), "\"Mamba2\" layers");
  EXPECT_MENTIONS(with("ssm_cfg", {{"layer", "Mamba2"}, {"D_has_hdim", true}}), "D_has_hdim");
  EXPECT_MENTIONS(with("ssm_cfg", {{"layer", "Mamba2"}, {"d_ssm", 512}, {"new", 1}}), "new");
  EXPECT_MENTIONS(with("ssm_cfg", {{"layer", "Mamba2"}, {"headdim", 100}}), "head_dim");
  EXPECT_MENTIONS(with("ssm_cfg", {{"layer", "Mamba2"}, {"ngroups", 5}}), "n_groups");
  EXPECT_MENTIONS(with("ssm_cfg", 3), "ssm_cfg must be");
  EXPECT_MENTIONS(with("d_intermediate", 1024), "d_intermediate");
  EXPECT_MENTIONS(with("attn_layer_idx", {1}), "attn_layer_idx");
  EXPECT_MENTIONS(with("rms_norm", false), "LayerNorm");
  EXPECT_MENTIONS(with("d_model", "wide"), "d_model");
  EXPECT_MENTIONS(with("vocab_size", -5), "vocab_size = -5");
  EXPECT_MENTIONS(with("vocab_size", 1.5), "integer");
  EXPECT_MENTIONS(with("pad_vocab_size_multiple", 0), "pad_vocab_size_multiple = 0");
  EXPECT_MENTIONS(with("mystery", 7), "mystery");
}

TEST(StateSpaces, OnlyMamba2CanBeWritten) {
  EXPECT_MENTIONS(error_of([] { to_state_spaces_config(ModelConfig()); }), "mamba2");
  ModelConfig config = ModelConfig::of_type("mamba2");
  config.norm_eps = 1e-6;
  EXPECT_MENTIONS(error_of([&] { to_state_spaces_config(config); }), "norm_eps");
}

TEST(ForeignConfig, TransformersMamba2GatesFirstWhateverItSays) {
  LoadReport report;
  const ModelConfig config =
      read(json::parse(R"({"model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 2,
        "head_dim": 16, "num_heads": 8, "state_size": 8, "layer_norm_epsilon": 3e-5,
        "norm_before_gate": true, "rms_norm": true, "time_step_min": 0.002, "vocab_size": 100})"),
           report);
  EXPECT_EQ(config.norm_eps, 3e-5);
  EXPECT_FALSE(config.mamba2.norm_before_gate);
  EXPECT_EQ(config.mamba2.dt_min, 0.002);
  EXPECT_EQ(report.format, "fla");
  EXPECT_EQ(report.ignored, std::vector<std::string>{"norm_before_gate"});
  // In today's names the field counts.
  const ModelConfig today =
      read(json::parse(R"({"model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 2,
        "head_dim": 16, "state_size": 8, "norm_before_gate": true, "vocab_size": 100})"),
           report);
  EXPECT_TRUE(today.mamba2.norm_before_gate);
}

TEST(ForeignConfig, FlaKnowsEflaOnlyWhenItIsDeltaNet) {
  ModelConfig config;
  EXPECT_MENTIONS(error_of([&] { as_fla_family(config); }), "rule exact");
  config.rule = Rule::kEuler;
  EXPECT_MENTIONS(error_of([&] { as_fla_family(config); }), "qk_norm none");
  config.qk_norm = QkNorm::kL2;
  EXPECT_EQ(as_fla_family(config).model_type, "delta_net");
  config.q_norm = QkNorm::kNone;
  EXPECT_MENTIONS(error_of([&] { as_fla_family(config); }), "delta_net");
  ModelConfig gated = ModelConfig::of_type("gated_efla");
  EXPECT_MENTIONS(error_of([&] { as_fla_family(gated); }), "gated_efla");
  gated.rule = Rule::kEuler;
  gated.qk_norm = QkNorm::kL2;
  EXPECT_EQ(as_fla_family(gated).model_type, "gated_deltanet");
  for (const char* type : {"delta_net", "gated_deltanet", "mamba2", "transformer"}) {
    EXPECT_EQ(as_fla_family(ModelConfig::of_type(type)).to_json(),
              ModelConfig::of_type(type).to_json());
  }
}

TEST(ForeignConfig, AFolderWithoutOrWithAHugeConfigIsNamed) {
  const fs::path folder = fs::path(::testing::TempDir()) / "efla_foreign_config";
  fs::create_directories(folder);
  const auto message = [&] { return error_of([&] { read_model_config(folder); }); };
  EXPECT_MENTIONS(message(), "config.json");
  std::ofstream(folder / "config.json") << std::string(3'000'000, 'x');
  EXPECT_MENTIONS(message(), "3000000 bytes");
  std::ofstream(folder / "config.json") << R"({"model_type": "llama", "hidden_size": 8})";
  EXPECT_MENTIONS(message(), "llama");
  fs::remove_all(folder);
}

}  // namespace
}  // namespace efla
