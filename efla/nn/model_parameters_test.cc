// Names, shapes, numbers and first values of the parameters.
#include <gtest/gtest.h>

#include <cmath>

#include "efla/nn/test_support.h"

namespace efla {
namespace {

using namespace testing_support;

int64_t sum_of_sizes(const LanguageModel& model) {
  int64_t total = 0;
  for (const auto& p : model->named_parameters()) total += p.value().numel();
  return total;
}

LanguageModel shapes_only(const ModelConfig& config) {
  return LanguageModel(config, at::TensorOptions().device(at::kMeta), WeightInit::kNone);
}

class ParametersOfEveryVariant : public ::testing::TestWithParam<Variant> {};
INSTANTIATE_TEST_SUITE_P(Nn, ParametersOfEveryVariant, ::testing::ValuesIn(variants()),
                         variant_name);

TEST_P(ParametersOfEveryVariant, CountIsTheSumOfTheTensors) {
  const ModelConfig& config = GetParam().config;
  LanguageModel model = shapes_only(config);
  const ParameterCount count = config.parameter_count();
  EXPECT_EQ(count.total(), sum_of_sizes(model));
  EXPECT_EQ(count.embedding, config.vocab_size * config.hidden_size);
  EXPECT_EQ(count.output_head, config.tie_word_embeddings ? 0 : count.embedding);
}

TEST(Parameters, PublishedModelsHaveTheirSizes) {
  ModelConfig config = ModelConfig::delta_net();
  EXPECT_EQ(sum_of_sizes(shapes_only(config)), 1'365'677'056);
  config.hidden_size = 1024;
  config.num_heads = 8;
  EXPECT_EQ(sum_of_sizes(shapes_only(config)), 374'362'112);
}

TEST(Parameters, NamesAndLayoutsAreFlas) {
  ModelConfig config = ModelConfig::delta_net();
  config.vocab_size = 50;
  config.hidden_size = 24;
  config.num_heads = 2;
  config.expand_v = 2;
  config.num_hidden_layers = 1;
  config.use_gate = true;
  const std::vector<std::pair<std::string, std::vector<int64_t>>> expected = {
      {"model.embeddings.weight", {50, 24}},
      {"model.layers.0.attn_norm.weight", {24}},
      {"model.layers.0.attn.q_proj.weight", {24, 24}},
      {"model.layers.0.attn.k_proj.weight", {24, 24}},
      {"model.layers.0.attn.v_proj.weight", {48, 24}},
      {"model.layers.0.attn.b_proj.weight", {2, 24}},
      {"model.layers.0.attn.q_conv1d.weight", {24, 1, 4}},
      {"model.layers.0.attn.k_conv1d.weight", {24, 1, 4}},
      {"model.layers.0.attn.v_conv1d.weight", {48, 1, 4}},
      {"model.layers.0.attn.g_proj.weight", {48, 24}},
      {"model.layers.0.attn.o_norm.weight", {24}},
      {"model.layers.0.attn.o_proj.weight", {24, 48}},
      {"model.layers.0.mlp_norm.weight", {24}},
      {"model.layers.0.mlp.gate_proj.weight", {256, 24}},
      {"model.layers.0.mlp.up_proj.weight", {256, 24}},
      {"model.layers.0.mlp.down_proj.weight", {24, 256}},
      {"model.norm.weight", {24}},
      {"lm_head.weight", {50, 24}},
  };
  const auto parameters = shapes_only(config)->named_parameters();
  EXPECT_EQ(parameters.size(), expected.size());
  for (const auto& [name, shape] : expected) {
    ASSERT_TRUE(parameters.contains(name)) << name;
    EXPECT_EQ(parameters[name].sizes(), at::IntArrayRef(shape)) << name;
  }
}

// Mean and standard deviation within five standard errors of N(0, initializer_range).
TEST(Parameters, InitialValues) {
  ModelConfig config;
  config.vocab_size = 500;
  config.hidden_size = 128;
  config.num_heads = 2;
  config.num_hidden_layers = 2;
  config.initializer_range = 0.03;
  config.conv_initializer_range = 0.3;
  config.use_gate = true;
  config.beta_activation = BetaActivation::kAdaptive;
  torch::manual_seed(5);
  LanguageModel model(config);
  for (const auto& p : model->named_parameters()) {
    const at::Tensor w = p.value().detach().to(at::kDouble);
    if (p.key().ends_with("adaptive_decay")) {
      EXPECT_LT(relative_error(at::softplus(w), at::ones_like(w)), 1e-6);
    } else if (w.dim() == 1) {
      EXPECT_TRUE(w.eq(1).all().item<bool>()) << p.key();
    } else {
      const double n = static_cast<double>(w.numel()), range = w.dim() == 3 ? 0.3 : 0.03;
      EXPECT_NEAR(w.mean().item<double>(), 0, 5 * range / std::sqrt(n)) << p.key();
      EXPECT_NEAR(w.std().item<double>(), range, 5 * range / std::sqrt(2 * n)) << p.key();
    }
  }
  // An untrained model knows nothing: the loss is close to that of guessing.
  const at::Tensor ids = random_tokens(config, 2, 50);
  const LossSum loss = model->loss(ids, ids);
  EXPECT_NEAR(loss.nll.item<double>() / static_cast<double>(loss.count), std::log(500.0), 0.3);
}

TEST(Parameters, TheSeedDecidesTheFirstValues) {
  const ModelConfig config = variants().front().config;
  const auto build = [&](uint64_t seed) {
    torch::manual_seed(seed);
    return LanguageModel(config);
  };
  const auto a = build(1)->named_parameters(), b = build(1)->named_parameters(),
             c = build(2)->named_parameters();
  for (const auto& p : a) {
    EXPECT_TRUE(p.value().equal(b[p.key()])) << p.key();
    if (p.value().dim() > 1) {
      EXPECT_FALSE(p.value().equal(c[p.key()])) << p.key();
    }
  }
}

}  // namespace
}  // namespace efla
