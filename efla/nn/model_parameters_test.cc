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

using Layout = std::vector<std::pair<std::string, std::vector<int64_t>>>;

void expect_layout(const ModelConfig& config, const Layout& expected) {
  const auto parameters = shapes_only(config)->named_parameters();
  EXPECT_EQ(parameters.size(), expected.size());
  for (const auto& [name, shape] : expected) {
    ASSERT_TRUE(parameters.contains(name)) << name;
    EXPECT_EQ(parameters[name].sizes(), at::IntArrayRef(shape)) << name;
  }
}

TEST(Parameters, NamesAndLayoutsAreFlas) {
  ModelConfig config = ModelConfig::delta_net();
  config.vocab_size = 50;
  config.hidden_size = 24;
  config.num_heads = 2;
  config.expand_v = 2;
  config.num_hidden_layers = 1;
  config.use_gate = true;
  expect_layout(config, {
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
                        });
}

TEST(Parameters, NamesAndLayoutsOfAGatedHybridAreFlas) {
  ModelConfig config = ModelConfig::of_type("gated_deltanet");
  config.vocab_size = 50;
  config.hidden_size = 24;
  config.num_heads = 2;
  config.num_v_heads = 4;
  config.head_dim = 6;
  config.num_hidden_layers = 2;
  config.tie_word_embeddings = true;
  config.attn = AttentionConfig();
  config.attn->layers = {1};
  config.attn->num_heads = 3;
  config.attn->num_kv_heads = 1;
  config.attn->qkv_bias = true;
  expect_layout(config, {
                            {"model.embeddings.weight", {50, 24}},
                            {"model.layers.0.attn_norm.weight", {24}},
                            {"model.layers.0.attn.q_proj.weight", {12, 24}},
                            {"model.layers.0.attn.k_proj.weight", {12, 24}},
                            {"model.layers.0.attn.v_proj.weight", {48, 24}},
                            {"model.layers.0.attn.a_proj.weight", {4, 24}},
                            {"model.layers.0.attn.b_proj.weight", {4, 24}},
                            {"model.layers.0.attn.A_log", {4}},
                            {"model.layers.0.attn.dt_bias", {4}},
                            {"model.layers.0.attn.q_conv1d.weight", {12, 1, 4}},
                            {"model.layers.0.attn.k_conv1d.weight", {12, 1, 4}},
                            {"model.layers.0.attn.v_conv1d.weight", {48, 1, 4}},
                            {"model.layers.0.attn.g_proj.weight", {48, 24}},
                            {"model.layers.0.attn.o_norm.weight", {12}},
                            {"model.layers.0.attn.o_proj.weight", {24, 48}},
                            {"model.layers.0.mlp_norm.weight", {24}},
                            {"model.layers.0.mlp.gate_proj.weight", {256, 24}},
                            {"model.layers.0.mlp.up_proj.weight", {256, 24}},
                            {"model.layers.0.mlp.down_proj.weight", {24, 256}},
                            {"model.layers.1.attn_norm.weight", {24}},
                            {"model.layers.1.attn.q_proj.weight", {24, 24}},
                            {"model.layers.1.attn.q_proj.bias", {24}},
                            {"model.layers.1.attn.k_proj.weight", {8, 24}},
                            {"model.layers.1.attn.k_proj.bias", {8}},
                            {"model.layers.1.attn.v_proj.weight", {8, 24}},
                            {"model.layers.1.attn.v_proj.bias", {8}},
                            {"model.layers.1.attn.o_proj.weight", {24, 24}},
                            {"model.layers.1.mlp_norm.weight", {24}},
                            {"model.layers.1.mlp.gate_proj.weight", {256, 24}},
                            {"model.layers.1.mlp.up_proj.weight", {256, 24}},
                            {"model.layers.1.mlp.down_proj.weight", {24, 256}},
                            {"model.norm.weight", {24}},
                        });
}

TEST(Parameters, NamesAndLayoutsOfMamba2AreFlas) {
  ModelConfig config = ModelConfig::of_type("mamba2");
  config.vocab_size = 50;
  config.hidden_size = 24;
  config.num_hidden_layers = 1;
  config.mamba2.head_dim = 8;
  config.mamba2.state_size = 5;
  config.mamba2.n_groups = 2;
  expect_layout(config,
                {
                    {"backbone.embeddings.weight", {50, 24}},
                    {"backbone.layers.0.norm.weight", {24}},
                    {"backbone.layers.0.mixer.in_proj.weight", {2 * 48 + 2 * 2 * 5 + 6, 24}},
                    {"backbone.layers.0.mixer.conv1d.weight", {48 + 2 * 2 * 5, 1, 4}},
                    {"backbone.layers.0.mixer.conv1d.bias", {48 + 2 * 2 * 5}},
                    {"backbone.layers.0.mixer.dt_bias", {6}},
                    {"backbone.layers.0.mixer.A_log", {6}},
                    {"backbone.layers.0.mixer.D", {6}},
                    {"backbone.layers.0.mixer.norm.weight", {48}},
                    {"backbone.layers.0.mixer.out_proj.weight", {24, 48}},
                    {"backbone.norm_f.weight", {24}},
                    {"lm_head.weight", {50, 24}},
                });
}

// Mean and standard deviation within five standard errors of N(0, range).
void expect_normal(const std::string& name, const at::Tensor& w, double range) {
  const double n = static_cast<double>(w.numel());
  EXPECT_NEAR(w.mean().item<double>(), 0, 5 * range / std::sqrt(n)) << name;
  EXPECT_NEAR(w.std().item<double>(), range, 5 * range / std::sqrt(2 * n)) << name;
}

// A uniform variable's mean within five standard errors, and nothing outside its interval.
void expect_uniform(const std::string& name, const at::Tensor& w, double low, double high) {
  const double slack = 1e-5 * (high - low), n = static_cast<double>(w.numel());
  EXPECT_GE(w.min().item<double>(), low - slack) << name;
  EXPECT_LE(w.max().item<double>(), high + slack) << name;
  const double deviation = (high - low) / std::sqrt(12.0);
  EXPECT_NEAR(w.mean().item<double>(), (low + high) / 2, 5 * deviation / std::sqrt(n)) << name;
  EXPECT_NEAR(w.std().item<double>(), deviation, 5 * deviation / std::sqrt(n)) << name;
}

void expect_initial_value(const std::string& name, const at::Tensor& w, const ModelConfig& c) {
  if (name.ends_with("A_log")) {
    const bool mamba2 = c.model_type == "mamba2";
    expect_uniform(name, w.exp(), mamba2 ? c.mamba2.a_init_low : 0,
                   mamba2 ? c.mamba2.a_init_high : 16);
  } else if (name.ends_with("dt_bias")) {
    expect_uniform(name, at::softplus(w).log(), std::log(0.001), std::log(0.1));
  } else if (name.ends_with("adaptive_decay")) {
    EXPECT_LT(relative_error(at::softplus(w), at::ones_like(w)), 1e-6);
  } else if (name.ends_with(".bias")) {
    EXPECT_TRUE(w.eq(0).all().item<bool>()) << name;
  } else if (w.dim() == 1) {
    EXPECT_TRUE(w.eq(1).all().item<bool>()) << name;
  } else if (name.ends_with("out_proj.weight")) {  // Mamba-2's, smaller with the depth
    const double fan_in = static_cast<double>(w.size(1));
    const double bound = 1 / std::sqrt(fan_in * static_cast<double>(c.num_hidden_layers));
    expect_uniform(name, w, -bound, bound);
  } else {
    expect_normal(name, w, w.dim() == 3 ? c.conv_initializer_range : c.initializer_range);
  }
}

TEST(Parameters, InitialValues) {
  for (const std::string& type : model_types()) {
    SCOPED_TRACE(type);
    ModelConfig config = ModelConfig::of_type(type);
    config.vocab_size = 500;
    config.hidden_size = 128;
    config.num_heads = 32;  // many, for the statistics of A_log and dt_bias
    config.head_dim = 4;
    config.mamba2.head_dim = 8;
    config.mamba2.use_bias = true;
    config.num_hidden_layers = 2;
    config.initializer_range = 0.03;
    config.conv_initializer_range = 0.3;
    config.use_gate = true;
    if (type.ends_with("efla")) config.beta_activation = BetaActivation::kAdaptive;
    torch::manual_seed(5);
    LanguageModel model(config);
    for (const auto& p : model->named_parameters()) {
      expect_initial_value(p.key(), p.value().detach().to(at::kDouble), config);
    }
    // An untrained model knows nothing: the loss is close to that of guessing.
    const at::Tensor ids = random_tokens(config, 2, 50);
    const LossSum loss = model->loss(ids, ids);
    EXPECT_NEAR(loss.nll.item<double>() / static_cast<double>(loss.count), std::log(500.0), 0.3);
  }
}

// The decay is an exponential of an exponential: bfloat16 would round its memory by per cents.
TEST(Parameters, DecayParametersAreFloat32InABfloat16Model) {
  for (const char* name : {"gated_deltanet_plain", "gated_efla_rate", "mamba2_plain"}) {
    const LanguageModel model = random_model(variant(name).config, at::kBFloat16);
    int decays = 0;
    for (const auto& p : model->named_parameters()) {
      const bool decay = p.key().ends_with("A_log") || p.key().ends_with("dt_bias");
      decays += decay;
      if (decay || p.key().ends_with("mixer.D")) {
        EXPECT_EQ(p.value().scalar_type(), at::kFloat) << p.key();
      } else {
        EXPECT_EQ(p.value().scalar_type(), at::kBFloat16) << p.key();
      }
    }
    EXPECT_EQ(decays, 4) << name;
  }
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
