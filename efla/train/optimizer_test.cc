#include "efla/train/optimizer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <vector>

#include "efla/io/error.h"
#include "efla/nn/language_model.h"
#include "efla/train/gradients.h"

namespace efla {
namespace {

NamedTensors example_parameters(at::ScalarType type) {
  torch::manual_seed(3);
  const auto options = torch::TensorOptions(type);
  NamedTensors parameters = {
      {"model.embeddings.weight", torch::randn({7, 5}, options)},
      {"model.layers.0.attn_norm.weight", torch::randn({5}, options)},
      {"model.layers.0.attn.q_conv1d.weight", torch::randn({5, 1, 4}, options)},
      {"model.layers.0.attn.dt_bias", torch::randn({3}, options)}};
  for (auto& [name, tensor] : parameters) tensor.requires_grad_(true);
  return parameters;
}

void set_gradients(const NamedTensors& parameters, int step) {
  torch::manual_seed(100 + step);
  for (const auto& [name, tensor] : parameters)
    tensor.mutable_grad() = torch::randn_like(tensor.detach());
}

// AdamW as in Loshchilov & Hutter's algorithm 2, one number at a time in double.
struct PlainAdamW {
  std::vector<double> m, v;
  int64_t t = 0;

  void step(std::vector<double>& w, const std::vector<double>& g, const OptimizerRecipe& recipe,
            double decay, double learning_rate) {
    m.resize(w.size());
    v.resize(w.size());
    ++t;
    for (size_t i = 0; i < w.size(); ++i) {
      m[i] = recipe.beta1 * m[i] + (1 - recipe.beta1) * g[i];
      v[i] = recipe.beta2 * v[i] + (1 - recipe.beta2) * g[i] * g[i];
      const double m_hat = m[i] / (1 - std::pow(recipe.beta1, t));
      const double v_hat = v[i] / (1 - std::pow(recipe.beta2, t));
      w[i] -= learning_rate * decay * w[i];
      w[i] -= learning_rate * m_hat / (std::sqrt(v_hat) + recipe.eps);
    }
  }
};

std::vector<double> values(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.detach().to(at::kDouble).contiguous().view(-1);
  return {flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel()};
}

void compare_with_plain(at::ScalarType type, double tolerance) {
  OptimizerRecipe recipe;
  recipe.weight_decay = 0.3;
  recipe.eps = 1e-3;  // large enough that a wrong place for it shows
  const NamedTensors parameters = example_parameters(type);
  AdamW optimizer(parameters, recipe);
  std::vector<std::vector<double>> plain;
  for (const auto& [name, tensor] : parameters) plain.push_back(values(tensor));
  std::vector<PlainAdamW> plain_optimizers(parameters.size());
  const double decay[] = {0.3, 0, 0.3, 0};
  for (int step = 1; step <= 5; ++step) {
    const double learning_rate = 0.01 * step;
    set_gradients(parameters, step);
    for (size_t i = 0; i < parameters.size(); ++i) {
      plain_optimizers[i].step(plain[i], values(parameters[i].second.grad()), recipe, decay[i],
                               learning_rate);
    }
    optimizer.step(learning_rate);
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const std::vector<double> actual = values(parameters[i].second);
    for (size_t j = 0; j < actual.size(); ++j) {
      EXPECT_NEAR(actual[j], plain[i][j], tolerance) << parameters[i].first << " entry " << j;
    }
  }
}

TEST(AdamW, EqualsThePlainAlgorithmInDouble) { compare_with_plain(at::kDouble, 1e-12); }
TEST(AdamW, EqualsThePlainAlgorithmInFloat) { compare_with_plain(at::kFloat, 2e-6); }

TEST(AdamW, DecaySparesNormsBiasesAndVectors) {
  const at::Tensor matrix = torch::zeros({2, 2}), vector = torch::zeros({2});
  EXPECT_TRUE(takes_weight_decay("lm_head.weight", matrix));
  EXPECT_TRUE(takes_weight_decay("attn.k_conv1d.weight", torch::zeros({2, 1, 4})));
  EXPECT_FALSE(takes_weight_decay("attn.b_proj.bias", vector));
  EXPECT_FALSE(takes_weight_decay("attn.A_log", vector));
  EXPECT_FALSE(takes_weight_decay("attn.o_norm.weight", vector));
  EXPECT_FALSE(takes_weight_decay("attn.o_norm.weight", matrix));
}

// A bfloat16 model with float32 decay parameters: each is updated in its own type, as if alone.
TEST(AdamW, ParametersOfSeveralTypesAreUpdatedTogether) {
  torch::manual_seed(8);
  NamedTensors mixed = {{"attn.q_proj.weight", torch::randn({4, 3}).to(at::kBFloat16)},
                        {"attn.A_log", torch::randn({5})},
                        {"attn_norm.weight", torch::randn({3}).to(at::kBFloat16)}};
  NamedTensors alone = {{"attn.A_log", mixed[1].second.clone()}};
  for (auto& [name, tensor] : mixed) tensor.mutable_grad() = torch::randn_like(tensor);
  alone[0].second.mutable_grad() = mixed[1].second.grad().clone();
  const at::Tensor before = mixed[0].second.clone();
  AdamW together(mixed, {}), single(alone, {});
  together.step(0.01);
  single.step(0.01);
  EXPECT_TRUE(at::equal(mixed[1].second, alone[0].second));
  EXPECT_FALSE(at::equal(mixed[0].second, before));
  EXPECT_EQ(together.state()[3].second.scalar_type(), at::kFloat);  // exp_avg.attn.A_log
}

// In every family: projections, convolutions and tables decay; norms, biases and the parameters of
// the decay (A_log, dt_bias, D) do not.
TEST(AdamW, DecayExemptionsOfEveryFamily) {
  for (const std::string& type : model_types()) {
    ModelConfig config = ModelConfig::of_type(type);
    config.num_hidden_layers = 1;
    if (config.attn) config.attn->qkv_bias = config.attn->qk_norm = true;
    config.mamba2.use_bias = true;
    if (type == "gated_efla") config.beta_activation = BetaActivation::kAdaptive;
    const LanguageModel model(config, torch::TensorOptions(at::kMeta), WeightInit::kNone);
    for (const auto& p : model->named_parameters()) {
      const std::string last = p.key().substr(p.key().rfind('.') + 1);
      const bool matrix = last == "weight" && p.key().find("norm") == std::string::npos;
      EXPECT_EQ(takes_weight_decay(p.key(), p.value()), matrix) << p.key();
    }
  }
}

TEST(AdamW, ParameterWithoutGradientIsLeftAlone) {
  const NamedTensors parameters = example_parameters(at::kFloat);
  AdamW optimizer(parameters, {});
  set_gradients(parameters, 1);
  parameters[0].second.mutable_grad().reset();
  const at::Tensor before = parameters[0].second.detach().clone();
  optimizer.step(0.1);
  EXPECT_TRUE(at::equal(parameters[0].second, before));
}

TEST(AdamW, RestoredStateGoesOnBitForBit) {
  const NamedTensors parameters = example_parameters(at::kFloat);
  AdamW optimizer(parameters, {});
  for (int step = 1; step <= 3; ++step) {
    set_gradients(parameters, step);
    optimizer.step(0.01);
  }
  std::map<std::string, at::Tensor> saved;
  for (const auto& [name, tensor] : optimizer.state()) saved[name] = tensor.clone();
  NamedTensors copies;
  for (const auto& [name, tensor] : parameters) {
    copies.emplace_back(name, tensor.detach().clone().requires_grad_(true));
  }
  AdamW restored(copies, {});
  restored.load_state(saved);
  set_gradients(parameters, 4);
  set_gradients(copies, 4);
  optimizer.step(0.01);
  restored.step(0.01);
  for (size_t i = 0; i < copies.size(); ++i) {
    EXPECT_TRUE(at::equal(copies[i].second, parameters[i].second)) << copies[i].first;
  }
}

TEST(AdamW, RefusesStateOfAnotherModel) {
  AdamW optimizer(example_parameters(at::kFloat), {});
  std::map<std::string, at::Tensor> saved;
  for (const auto& [name, tensor] : optimizer.state()) saved[name] = tensor.clone();
  auto missing = saved;
  missing.erase("step.model.embeddings.weight");
  EXPECT_THROW(optimizer.load_state(missing), Error);
  auto shaped = saved;
  shaped["exp_avg.model.embeddings.weight"] = torch::zeros({5, 7});
  EXPECT_THROW(optimizer.load_state(shaped), Error);
  auto typed = saved;
  typed["exp_avg.model.embeddings.weight"] = torch::zeros({7, 5}, at::kDouble);
  EXPECT_THROW(optimizer.load_state(typed), Error);
}

NamedTensors parameters_with_gradients() {
  NamedTensors parameters;
  for (const std::vector<float>& gradient :
       {std::vector<float>{3, 0}, std::vector<float>{0, 4, 12}}) {
    const at::Tensor tensor = torch::ones({static_cast<int64_t>(gradient.size())});
    tensor.mutable_grad() = torch::tensor(gradient);
    parameters.emplace_back("p" + std::to_string(parameters.size()), tensor);
  }
  return parameters;
}

TEST(Gradients, ClipScalesToTheNormAndReportsTheOldOne) {
  const NamedTensors parameters = parameters_with_gradients();
  EXPECT_NEAR(clip_gradients(parameters, 6.5), 13.0, 1e-5);  // 3, 4, 12 -> 13
  EXPECT_TRUE(at::allclose(parameters[0].second.grad(), torch::tensor({1.5f, 0.0f})));
  EXPECT_TRUE(at::allclose(parameters[1].second.grad(), torch::tensor({0.0f, 2.0f, 6.0f})));
}

TEST(Gradients, ClipLeavesSmallAndUnlimitedGradients) {
  for (const double limit : {13.5, 0.0}) {
    const NamedTensors parameters = parameters_with_gradients();
    EXPECT_NEAR(clip_gradients(parameters, limit), 13.0, 1e-5);
    EXPECT_TRUE(at::equal(parameters[1].second.grad(), torch::tensor({0.0f, 4.0f, 12.0f})));
  }
}

TEST(Gradients, FindsTheFirstNonFiniteTensor) {
  const NamedTensors parameters = parameters_with_gradients();
  EXPECT_EQ(first_non_finite(parameters), std::nullopt);
  parameters[0].second.mutable_grad()[1] = std::nan("");
  EXPECT_EQ(first_non_finite(parameters), "gradient of p0");
  parameters[1].second.mutable_grad()[0] = INFINITY;
  EXPECT_EQ(first_non_finite(parameters), "gradient of p1");  // backward reaches it first
  EXPECT_FALSE(std::isfinite(clip_gradients(parameters, 1.0)));
  const at::Tensor weight = parameters[0].second;
  weight[0] = INFINITY;
  EXPECT_EQ(first_non_finite(parameters), "weight p0");
}

}  // namespace
}  // namespace efla
