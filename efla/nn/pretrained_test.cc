#include "efla/nn/pretrained.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "efla/io/error.h"
#include "efla/io/safetensors.h"
#include "efla/nn/test_support.h"

namespace efla {
namespace {

namespace fs = std::filesystem;
using namespace testing_support;
using Tensors = std::vector<std::pair<std::string, at::Tensor>>;

// A folder of the test's own, removed afterwards.
class PretrainedTest : public ::testing::Test {
 protected:
  PretrainedTest() {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::path(::testing::TempDir()) / (std::string("efla_pretrained_") + info->name());
    fs::remove_all(folder_);
  }
  ~PretrainedTest() override { fs::remove_all(folder_); }

  std::string folder() const { return folder_.string(); }
  fs::path weights() const { return folder_ / "model.safetensors"; }

  /// The tensors of the saved folder, to be tampered with and written back.
  Tensors stored() const {
    const SafetensorsFile file = SafetensorsFile::open(weights());
    Tensors out;
    for (const std::string& name : file.names()) out.emplace_back(name, file.tensor(name).clone());
    return out;
  }
  std::string load_error() const {
    try {
      load_pretrained(folder());
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  fs::path folder_;
  ModelConfig config_ = variants().front().config;
};

void expect_same(const LanguageModel& a, const LanguageModel& b) {
  const auto expected = b->named_parameters();
  ASSERT_EQ(a->named_parameters().size(), expected.size());
  for (const auto& p : a->named_parameters()) {
    EXPECT_EQ(p.value().scalar_type(), expected[p.key()].scalar_type());
    EXPECT_TRUE(p.value().equal(expected[p.key()])) << p.key();
  }
}

std::pair<std::string, at::Tensor>& named(Tensors& tensors, const std::string& name) {
  for (auto& entry : tensors) {
    if (entry.first == name) return entry;
  }
  throw std::out_of_range(name);
}

TEST_F(PretrainedTest, RoundTripOfEveryVariantAndDtype) {
  for (const Variant& variant : variants()) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      const LanguageModel model = random_model(variant.config, dtype);
      save_pretrained(model, folder());
      const LanguageModel back = load_pretrained(folder());
      EXPECT_EQ(back->config().to_json(), variant.config.to_json()) << variant.name;
      expect_same(back, model);
    }
  }
  EXPECT_EQ(load_pretrained(folder(), at::kFloat)->dtype(), at::kFloat);
}

TEST_F(PretrainedTest, LoadedWeightsAreTrainable) {
  save_pretrained(random_model(config_), folder());
  LanguageModel model = load_pretrained(folder());
  const at::Tensor ids = random_tokens(config_, 1, 5);
  model->loss(ids, ids).nll.backward();
  for (const auto& p : model->named_parameters()) EXPECT_TRUE(p.value().grad().defined());
}

TEST_F(PretrainedTest, EveryMisfitIsListedInOneMessage) {
  save_pretrained(random_model(config_), folder());
  Tensors tensors = stored();
  named(tensors, "model.norm.weight").first = "model.norm.bias";
  named(tensors, "lm_head.weight").second = at::zeros({61, 31});
  named(tensors, "model.layers.1.attn.b_proj.weight").second = at::zeros({2, 32}, at::kLong);
  save_safetensors(weights(), tensors);
  const std::string error = load_error();
  for (const char* text : {"missing: model.norm.weight", "unexpected: model.norm.bias",
                           "lm_head.weight [61, 31] instead of [61, 32]",
                           "model.layers.1.attn.b_proj.weight is not floating point"}) {
    EXPECT_NE(error.find(text), std::string::npos) << error;
  }
  EXPECT_NE(error.find(folder()), std::string::npos) << error;
}

TEST_F(PretrainedTest, ALongListIsCut) {
  save_pretrained(random_model(config_), folder());
  save_safetensors(weights(), {{"model.norm.weight", at::ones({32})}});
  EXPECT_NE(load_error().find(" more"), std::string::npos) << load_error();
}

TEST_F(PretrainedTest, FusedMlpOfOldFlaCheckpointsIsSplit) {
  const LanguageModel model = random_model(config_);
  save_pretrained(model, folder());
  Tensors fused;
  for (const auto& [name, tensor] : stored()) {
    if (name.ends_with("mlp.up_proj.weight")) continue;
    at::Tensor value = tensor;
    if (name.ends_with("mlp.gate_proj.weight")) {
      std::string up = name;
      up.replace(up.rfind("gate"), 4, "up");
      value = at::cat({tensor, model->named_parameters()[up].detach()});
    }
    fused.emplace_back(name, value);
  }
  save_safetensors(weights(), fused);
  expect_same(load_pretrained(folder()), model);
}

TEST_F(PretrainedTest, TiedModelsMayRepeatTheHeadButNotChangeIt) {
  config_.tie_word_embeddings = true;
  const LanguageModel model = random_model(config_);
  save_pretrained(model, folder());
  Tensors tensors = stored();
  tensors.emplace_back("lm_head.weight", named(tensors, "model.embeddings.weight").second.clone());
  save_safetensors(weights(), tensors);
  expect_same(load_pretrained(folder()), model);
  tensors.back().second[3][4] += 1;
  save_safetensors(weights(), tensors);
  EXPECT_NE(load_error().find("unexpected: lm_head.weight"), std::string::npos) << load_error();
}

TEST_F(PretrainedTest, ATiedModelMayKeepItsMatrixUnderTheHeadsName) {
  config_.tie_word_embeddings = true;
  const LanguageModel model = random_model(config_);
  save_pretrained(model, folder());
  Tensors tensors = stored();
  named(tensors, "model.embeddings.weight").first = "lm_head.weight";
  save_safetensors(weights(), tensors);
  expect_same(load_pretrained(folder()), model);
}

TEST_F(PretrainedTest, TensorsThatNothingReadsAreReported) {
  const LanguageModel model = random_model(config_);
  save_pretrained(model, folder());
  Tensors tensors = stored();
  for (const char* layer : {"0", "1"}) {
    tensors.emplace_back(std::string("model.layers.") + layer + ".attn.D", at::ones({2}));
  }
  save_safetensors(weights(), tensors);
  LoadReport report;
  expect_same(load_pretrained(folder(), std::nullopt, &report), model);
  ASSERT_EQ(report.ignored.size(), 1u);
  EXPECT_EQ(report.ignored[0], "model.layers.0.attn.D and 1 more of its kind");
  EXPECT_EQ(report.format, "efla");
}

TEST_F(PretrainedTest, ShardsAndStorageTypes) {
  const LanguageModel model = random_model(config_);
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble}) {
    SaveOptions options;
    options.dtype = dtype;
    options.max_shard_bytes = 4000;
    save_pretrained(model, folder(), options);
    EXPECT_FALSE(fs::exists(weights()));
    EXPECT_TRUE(fs::exists(folder_ / "model.safetensors.index.json"));
    EXPECT_EQ(checkpoint_dtype(folder()), dtype);
    const LanguageModel back = load_pretrained(folder());
    EXPECT_EQ(back->dtype(), dtype == at::kHalf ? at::kFloat : dtype);
    const auto expected = model->named_parameters();
    for (const auto& p : back->named_parameters()) {
      EXPECT_TRUE(p.value().equal(expected[p.key()].to(dtype).to(p.value().scalar_type())))
          << p.key();
    }
  }
  save_pretrained(model, folder());
  expect_same(load_pretrained(folder()), model);
}

TEST_F(PretrainedTest, WhatAModelKeepsInFloat32IsStoredSo) {
  const ModelConfig config = ModelConfig::of_type("gated_deltanet");
  const auto dtypes = storage_dtypes(config, at::kBFloat16);
  EXPECT_EQ(dtypes.at("model.layers.0.attn.A_log"), at::kFloat);
  EXPECT_EQ(dtypes.at("model.layers.20.attn.dt_bias"), at::kFloat);
  EXPECT_EQ(dtypes.at("model.layers.0.attn.q_proj.weight"), at::kBFloat16);
  EXPECT_EQ(storage_dtypes(config, at::kHalf).at("lm_head.weight"), at::kHalf);
}

TEST_F(PretrainedTest, AHugeConfigOverSmallFilesCostsNoMemory) {
  save_pretrained(random_model(config_), folder());
  nlohmann::json json = config_.to_json();
  json["hidden_size"] = 16384;  // 100 GB of weights
  json["num_heads"] = 32;
  json["intermediate_size"] = 65536;
  json["vocab_size"] = 1'000'000;
  std::ofstream(folder_ / "config.json") << json;
  EXPECT_NE(load_error().find("instead of [1000000, 16384]"), std::string::npos) << load_error();
}

TEST_F(PretrainedTest, ACheckpointOfAnotherFamilyIsRefused) {
  save_pretrained(random_model(config_), folder());
  nlohmann::json json = config_.to_json();
  json["model_type"] = "transformer";
  for (const char* key :
       {"rule", "beta_activation", "qk_norm", "q_norm", "qk_activation", "expand_k", "expand_v",
        "use_beta", "use_gate", "use_output_norm", "use_short_conv", "conv_size",
        "allow_neg_eigval", "attn", "conv_initializer_range"}) {
    json.erase(key);
  }
  std::ofstream(folder_ / "config.json") << json;
  const std::string error = load_error();
  EXPECT_NE(error.find("transformer"), std::string::npos) << error;
  EXPECT_NE(error.find("unexpected: model.layers.0.attn.b_proj.weight"), std::string::npos)
      << error;
}

// Every family through each format that has a place for it.
TEST_F(PretrainedTest, EveryFamilyComesBackFromEveryFormat) {
  for (const char* type :
       {"efla", "delta_net", "gated_deltanet", "gated_efla", "mamba2", "transformer"}) {
    ModelConfig config = ModelConfig::of_type(type);
    config.vocab_size = 61;
    config.hidden_size = 32;
    config.num_hidden_layers = 2;
    config.num_heads = 2;
    config.head_dim = 16;
    config.intermediate_size = 40;
    config.mamba2.head_dim = 16;
    config.mamba2.state_size = 8;
    config.tie_word_embeddings = true;
    if (config.attn) config.attn->num_heads = 2;
    const LanguageModel model = random_model(config);
    for (const auto format :
         {CheckpointFormat::kEfla, CheckpointFormat::kFla, CheckpointFormat::kStateSpaces}) {
      const bool ours = config.model_type == "efla" || config.model_type == "gated_efla";
      const bool fits = format == CheckpointFormat::kEfla ||
                        (format == CheckpointFormat::kFla && !ours) ||
                        (format == CheckpointFormat::kStateSpaces && config.model_type == "mamba2");
      fs::remove_all(folder_);
      SaveOptions options;
      options.format = format;
      if (!fits) {
        EXPECT_THROW(save_pretrained(model, folder(), options), UsageError) << type;
        EXPECT_FALSE(fs::exists(folder_));
        continue;
      }
      save_pretrained(model, folder(), options);
      LoadReport report;
      expect_same(load_pretrained(folder(), std::nullopt, &report), model);
      EXPECT_EQ(report.format, format == CheckpointFormat::kStateSpaces ? "state-spaces"
                               : ours                                   ? "efla"
                                                                        : "fla");
      EXPECT_EQ(check_pretrained(folder()).parameter_count().total(),
                config.parameter_count().total());
    }
  }
}

TEST_F(PretrainedTest, LoadWeightsFillsAModelAndConverts) {
  const LanguageModel model = random_model(config_);
  save_pretrained(model, folder());
  LanguageModel other = random_model(config_, at::kDouble, 9);
  load_weights(other, weights());
  expect_same(other, copy_model(model, config_, at::kDouble));
}

TEST_F(PretrainedTest, BrokenFoldersAreNamed) {
  EXPECT_NE(load_error().find("no such folder"), std::string::npos);
  fs::create_directories(folder_);
  EXPECT_NE(load_error().find("config.json"), std::string::npos) << load_error();
  save_pretrained(random_model(config_), folder());
  fs::resize_file(weights(), fs::file_size(weights()) - 10);
  EXPECT_NE(load_error().find("model.safetensors"), std::string::npos) << load_error();
  fs::remove(weights());
  EXPECT_NE(load_error().find(folder()), std::string::npos) << load_error();
  save_pretrained(random_model(config_), folder());
  std::ofstream(folder_ / "config.json") << "{\"hidden_size\": -1}";
  EXPECT_NE(load_error().find("hidden_size"), std::string::npos) << load_error();
}

}  // namespace
}  // namespace efla
