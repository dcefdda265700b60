// The model against its equations: every switch in float64, gradients, precisions, identities.
#include <gtest/gtest.h>

#include "efla/nn/test_support.h"

namespace efla {
namespace {

using namespace testing_support;

// Next-token targets inside the window; the last position is ignored.
at::Tensor shifted(const at::Tensor& ids) {
  at::Tensor targets = at::full_like(ids, kIgnoreTarget);
  targets.narrow(1, 0, ids.size(1) - 1).copy_(ids.narrow(1, 1, ids.size(1) - 1));
  return targets;
}

at::Tensor mean_loss(LanguageModel& model, const at::Tensor& ids) {
  const LossSum loss = model->loss(ids, shifted(ids));
  return loss.nll / loss.count;
}

class EveryVariant : public ::testing::TestWithParam<Variant> {
 protected:
  const ModelConfig& config() const { return GetParam().config; }
};
INSTANTIATE_TEST_SUITE_P(Nn, EveryVariant, ::testing::ValuesIn(variants()), variant_name);

TEST_P(EveryVariant, ForwardIsTheEquations) {
  LanguageModel model = random_model(config(), at::kDouble);
  const at::Tensor ids = random_tokens(config(), 2, 75);
  const torch::NoGradGuard no_grad;
  EXPECT_LT(relative_error(model->forward(ids), reference_logits(model, ids)), 1e-10);
}

TEST_P(EveryVariant, Float32ForwardAndGradientsMatchFloat64) {
  LanguageModel exact = random_model(config(), at::kDouble);
  LanguageModel model = copy_model(exact, config(), at::kFloat);
  const at::Tensor ids = random_tokens(config(), 2, 75);
  EXPECT_LT(relative_error(model->forward(ids), exact->forward(ids)), 1e-5);
  mean_loss(model, ids).backward();
  mean_loss(exact, ids).backward();
  const auto expected = exact->named_parameters();
  for (const auto& p : model->named_parameters()) {
    ASSERT_TRUE(p.value().grad().defined()) << p.key();
    EXPECT_GT(expected[p.key()].grad().norm().item<double>(), 0) << p.key();
    EXPECT_LT(relative_error(p.value().grad(), expected[p.key()].grad()), 1e-4) << p.key();
  }
}

// Along a random direction in every parameter tensor, in float64.
TEST_P(EveryVariant, GradientsMatchFiniteDifferences) {
  LanguageModel model = random_model(config(), at::kDouble);
  const at::Tensor ids = random_tokens(config(), 2, 21);
  mean_loss(model, ids).backward();
  const torch::NoGradGuard no_grad;
  constexpr double kStep = 1e-6;
  for (auto& p : model->named_parameters()) {
    const at::Tensor direction = at::randn_like(p.value());
    const double slope = (p.value().grad() * direction).sum().item<double>();
    p.value().add_(direction, kStep);
    const double above = mean_loss(model, ids).item<double>();
    p.value().add_(direction, -2 * kStep);
    const double below = mean_loss(model, ids).item<double>();
    p.value().add_(direction, kStep);
    EXPECT_NEAR((above - below) / (2 * kStep), slope, 1e-6 * (1 + std::abs(slope))) << p.key();
  }
}

TEST_P(EveryVariant, Bfloat16FollowsFloat32) {
  LanguageModel model = random_model(config(), at::kBFloat16);
  LanguageModel wide = copy_model(model, config(), at::kFloat);
  const at::Tensor ids = random_tokens(config(), 2, 40);
  const at::Tensor logits = model->forward(ids);
  EXPECT_EQ(logits.scalar_type(), at::kBFloat16);
  EXPECT_LT(relative_error(logits, wide->forward(ids)), 5e-2);
  mean_loss(model, ids).backward();
  for (const auto& p : model->named_parameters()) {
    EXPECT_TRUE(p.value().grad().isfinite().all().item<bool>()) << p.key();
  }
}

// Mamba-2's residual stream stays in float32 where the weights are bfloat16: a sum over many layers
// is rounded once instead of in every layer.
TEST(LanguageModel, Float32ResidualsLoseLess) {
  ModelConfig config = variant("mamba2_plain").config;
  config.num_hidden_layers = 24;
  LanguageModel wide = random_model(config);
  {
    // A long residual: its rounding outweighs that of the branches.
    const torch::NoGradGuard no_grad;
    wide->named_parameters()["backbone.embeddings.weight"].mul_(64);
  }
  LanguageModel kept = copy_model(wide, config, at::kBFloat16);
  config.mamba2.residual_in_fp32 = false;
  LanguageModel rounded = copy_model(wide, config, at::kBFloat16);
  // The rounding of the weights is common to both and not the question.
  LanguageModel exact = copy_model(kept, config, at::kFloat);
  const at::Tensor ids = random_tokens(config, 2, 40);
  const torch::NoGradGuard no_grad;
  const at::Tensor expected = exact->forward(ids);
  EXPECT_LT(relative_error(kept->forward(ids), expected),
            0.8 * relative_error(rounded->forward(ids), expected));
}

// 1 - exp(-softplus(z)) = sigmoid(z): on unit keys the loose-beta exact flow is DeltaNet
// (docs/mathematics.md, "The layer").
TEST(Identities, ExactFlowOnUnitKeysWithSoftplusIsDeltaNet) {
  Variant efla = variant("efla_unit_keys");
  const Variant delta_net = variant("delta_net_plain");
  efla.config.beta_activation = BetaActivation::kSoftplus;
  LanguageModel reference = random_model(delta_net.config, at::kDouble);
  LanguageModel model = copy_model(reference, efla.config, at::kDouble);
  const at::Tensor ids = random_tokens(efla.config, 2, 75);
  // Not exactly: the l2 norm's epsilon leaves keys a little short of unit length.
  EXPECT_LT(relative_error(model->forward(ids), reference->forward(ids)), 1e-5);
  mean_loss(model, ids).backward();
  mean_loss(reference, ids).backward();
  const auto expected = reference->named_parameters();
  for (const auto& p : model->named_parameters()) {
    EXPECT_LT(relative_error(p.value().grad(), expected[p.key()].grad()), 1e-4) << p.key();
  }
  // The step rules do differ: with the same beta the two models disagree.
  efla.config.beta_activation = BetaActivation::kSigmoid;
  LanguageModel other = copy_model(reference, efla.config, at::kDouble);
  EXPECT_GT(relative_error(other->forward(ids), reference->forward(ids)), 1e-2);
}

// The two models, one gated and one not, with the same weights and a gate that never closes.
void expect_equal_at_gate_one(const ModelConfig& gated, const ModelConfig& plain) {
  LanguageModel with_gate = random_model(gated, at::kDouble);
  {
    const torch::NoGradGuard no_grad;
    for (auto& p : with_gate->named_parameters()) {
      // A = e^-60: a = exp(-A softplus(...)) is one in float64.
      if (p.key().ends_with("A_log")) p.value().fill_(-60);
    }
  }
  LanguageModel without = copy_model(with_gate, plain, at::kDouble);
  const at::Tensor ids = random_tokens(plain, 2, 75);
  EXPECT_LT(relative_error(with_gate->forward(ids), without->forward(ids)), 1e-12);
  mean_loss(with_gate, ids).backward();
  mean_loss(without, ids).backward();
  const auto actual = with_gate->named_parameters();
  for (const auto& p : without->named_parameters()) {
    EXPECT_LT(relative_error(actual[p.key()].grad(), p.value().grad()), 1e-10) << p.key();
  }
  // And a gate does something: with the random A the two disagree.
  LanguageModel closing = random_model(gated, at::kDouble);
  EXPECT_GT(relative_error(closing->forward(ids), without->forward(ids)), 1e-2);
}

// The ungated model whose heads have the sizes of the gated one.
ModelConfig ungated(const ModelConfig& gated, const std::string& model_type) {
  ModelConfig config = gated;
  config.model_type = model_type;
  const double hidden = static_cast<double>(gated.hidden_size);
  config.expand_k = static_cast<double>(gated.key_size()) / hidden;
  config.expand_v = static_cast<double>(gated.value_size()) / hidden;
  return config;
}

TEST(Identities, GatedDeltaNetWithAnOpenGateIsDeltaNet) {
  const ModelConfig gated = variant("gated_deltanet_plain").config;
  expect_equal_at_gate_one(gated, ungated(gated, "delta_net"));
}

TEST(Identities, GatedEflaWithAnOpenGateIsEflaInBothReadings) {
  ModelConfig gated = variant("gated_efla_rate").config;
  ModelConfig plain = ungated(gated, "efla");
  expect_equal_at_gate_one(gated, plain);
  gated.rule = Rule::kExactLog;
  expect_equal_at_gate_one(gated, plain);
}

// Where they differ: the rate reading forgets at most to 1/e a token, the log reading all of it.
TEST(Identities, TheTwoReadingsOfAClosedGateDiffer) {
  LanguageModel rate = random_model(variant("gated_efla_rate").config, at::kDouble);
  LanguageModel log = copy_model(rate, variant("gated_efla_log").config, at::kDouble);
  const at::Tensor ids = random_tokens(rate->config(), 1, 40);
  EXPECT_GT(relative_error(log->forward(ids), rate->forward(ids)), 1e-2);
}

// Why the config has no need to say how EFLA normalises queries: the output norm removes the
// query's length, up to its epsilon.
TEST(Identities, QueryNormIsRemovedByTheOutputNorm) {
  ModelConfig config = variants().front().config;
  config.norm_eps = 1e-20;
  LanguageModel raw = random_model(config, at::kDouble);
  config.q_norm = QkNorm::kL2;
  LanguageModel unit = copy_model(raw, config, at::kDouble);
  const at::Tensor ids = random_tokens(config, 2, 30);
  EXPECT_LT(relative_error(raw->forward(ids), unit->forward(ids)), 1e-8);
}

TEST(LanguageModel, LossIsTheCrossEntropyOfItsLogits) {
  const ModelConfig config = variants().front().config;
  LanguageModel model = random_model(config);
  const at::Tensor ids = random_tokens(config, 3, 20), targets = shifted(ids);
  const LossSum fused = model->loss(ids, targets);
  EXPECT_EQ(fused.count, 3 * 19);
  const at::Tensor plain = at::cross_entropy_loss(
      model->forward(ids).flatten(0, 1), targets.flatten(), {}, at::Reduction::Sum, kIgnoreTarget);
  EXPECT_LT(relative_error(fused.nll, plain), 1e-6);
}

TEST(LanguageModel, EmptyInputGivesEmptyLogits) {
  const ModelConfig config = variants().front().config;
  LanguageModel model = random_model(config);
  EXPECT_EQ(model->forward(random_tokens(config, 2, 0)).sizes(), at::IntArrayRef({2, 0, 61}));
  EXPECT_EQ(model->forward(random_tokens(config, 0, 5)).sizes(), at::IntArrayRef({0, 5, 61}));
}

TEST(LanguageModel, RefusesTokensOutsideTheVocabulary) {
  const ModelConfig config = variants().front().config;
  LanguageModel model = random_model(config);
  at::Tensor ids = random_tokens(config, 1, 4);
  ids[0][2] = 61;
  EXPECT_THROW(model->forward(ids), c10::Error);
  ids[0][2] = -1;
  EXPECT_THROW(model->forward(ids), c10::Error);
  EXPECT_THROW(model->forward(ids[0]), c10::Error);
  EXPECT_THROW(model->forward(ids.to(at::kFloat)), c10::Error);
}

}  // namespace
}  // namespace efla
