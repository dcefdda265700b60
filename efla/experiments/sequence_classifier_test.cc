#include "efla/experiments/sequence_classifier.h"

#include <gtest/gtest.h>

#include <cmath>

#include "efla/experiments/arms.h"
#include "efla/io/test_util.h"

namespace efla {
namespace {

constexpr int64_t kWidth = 8, kLength = 9;

at::TensorOptions wide() { return at::TensorOptions().dtype(at::kDouble); }

ClassifierShape small_shape(int64_t layers = 1, int64_t heads = 1) {
  return {kLength, kWidth, heads, layers, 10};
}

// One token of the equation or method that an arm stands for, with dense matrices: no line of the
// code under test, no collapsed coefficient.
at::Tensor token(const std::string& arm, const at::Tensor& s, at::Tensor k, at::Tensor v,
                 double beta, double gate) {
  const bool unit = arm == "deltanet" || arm == "deltanet_scaled" || arm == "efla_unit" ||
                    arm == "gated_deltanet";
  const at::Tensor length = (k.square().sum() + 1e-6).sqrt();
  if (unit) k = k / length;
  if (arm == "deltanet_scaled") v = v / length;
  const at::Tensor eye = torch::eye(k.size(0), wide());
  const at::Tensor a = torch::outer(k, k), b = torch::outer(k, v);
  const auto slope = [&](const at::Tensor& x) { return b - a.matmul(x); };
  if (arm == "mamba2") return std::exp(gate) * s + beta * b;
  if (arm == "deltanet" || arm == "deltanet_scaled" || arm == "euler_raw")
    return s + beta * slope(s);
  if (arm == "gated_deltanet") {
    return std::exp(gate) * (eye - beta * a).matmul(s) + beta * b;
  }
  if (arm == "rk2") return s + beta * slope(s + beta / 2 * slope(s));
  if (arm == "rk4") {
    const at::Tensor k1 = slope(s), k2 = slope(s + beta / 2 * k1), k3 = slope(s + beta / 2 * k2);
    return s + beta / 6 * (k1 + 2 * k2 + 2 * k3 + slope(s + beta * k3));
  }
  // The exact flow of dS/ds = -M S + B over unit time, from the exponential of an augmented matrix:
  // exp([[-M, B], [0, 0]]) = [[e^{-M}, int e^{-sM} B ds], [0, 1]].
  const double forget = arm == "gated_efla" ? std::exp(gate) : 1;  // a of the paper's appendix D
  const at::Tensor m = (1 - forget) * eye + forget * beta * a;
  const int64_t d = k.size(0), n = v.size(0);
  const at::Tensor augmented = torch::zeros({d + n, d + n}, wide());
  augmented.narrow(0, 0, d).narrow(1, 0, d).copy_(-m);
  augmented.narrow(0, 0, d).narrow(1, d, n).copy_(beta * b);
  const at::Tensor flow = at::matrix_exp(augmented).narrow(0, 0, d);
  return flow.narrow(1, 0, d).matmul(s) + flow.narrow(1, d, n);
}

// The released script, image by image and token by token. Parameters in the order of creation.
at::Tensor script(const std::string& arm, const SequenceClassifier& model,
                  const at::Tensor& images) {
  const auto& p = model.parameters();
  const at::Tensor embed = p[0], position = p[1], wq = p[2], wk = p[3], wv = p[4], wb = p[5],
                   bb = p[6], norm_w = p[7], norm_b = p[8], head = p[9], head_b = p[10];
  std::vector<at::Tensor> logits;
  for (int64_t i = 0; i < images.size(0); ++i) {
    at::Tensor s = torch::zeros({kWidth, kWidth}, wide()), q;
    for (int64_t t = 0; t < kLength; ++t) {
      const at::Tensor z = images[i][t] * embed.squeeze(1) + position[t];
      const at::Tensor h = z * 0.5 * (1 + torch::erf(z / std::sqrt(2.0)));  // GELU
      const at::Tensor pre = (wb.squeeze(0).dot(h) + bb).squeeze();
      double beta = torch::sigmoid(pre).item<double>(), gate = 0;
      if (arm == "mamba2") {
        beta = std::log1p(std::exp(pre.item<double>()));
        gate = -std::exp(p[11].item<double>()) * beta;
      }
      if (arm.starts_with("gated")) {
        const double dt = p[12].squeeze(0).dot(h).item<double>() + p[13].item<double>();
        gate = -std::exp(p[11].item<double>()) * std::log1p(std::exp(dt));
      }
      s = token(arm, s, wk.matmul(h), wv.matmul(h), beta, gate);
      q = wq.matmul(h);
    }
    const at::Tensor o = s.t().matmul(q);
    const at::Tensor centred = o - o.mean();
    const at::Tensor normal = centred / (centred.square().mean() + 1e-5).sqrt() * norm_w + norm_b;
    logits.push_back(head.matmul(normal) + head_b);
  }
  return torch::stack(logits);
}

class EveryArm : public ::testing::TestWithParam<std::string> {};

TEST_P(EveryArm, IsTheScriptWithItsRecurrence) {
  SequenceClassifier model(arm_named(GetParam()), small_shape(), 3, wide());
  {
    // Larger maps, so that keys are long, gates open and no term is negligible.
    const torch::NoGradGuard no_grad;
    for (const at::Tensor& p : model.parameters()) {
      if (p.dim() == 2) p.mul_(2.5);
      if (p.dim() == 1 && p.size(0) == 1) p.add_(0.7);
    }
  }
  torch::manual_seed(1);
  const at::Tensor images = torch::rand({3, kLength}, wide());
  const torch::NoGradGuard no_grad;
  const at::Tensor expected = script(GetParam(), model, images);
  EXPECT_TRUE(torch::allclose(model.forward(images), expected, 1e-8, 1e-9))
      << (model.forward(images) - expected).abs().max();
}

// Directional derivatives of the loss against differences, over all parameters at once.
TEST_P(EveryArm, EveryParameterHasItsGradient) {
  for (const int64_t layers : {1, 2}) {
    const SequenceClassifier model(arm_named(GetParam()), small_shape(layers, 2), 3, wide());
    torch::manual_seed(2);
    const at::Tensor images = torch::rand({2, kLength}, wide());
    const at::Tensor labels = torch::tensor({3, 7}, at::kLong);
    const auto loss = [&] { return torch::cross_entropy_loss(model.forward(images), labels); };
    const auto gradients = torch::autograd::grad({loss()}, model.parameters());
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const at::Tensor& parameter = model.parameters()[i];
      const at::Tensor direction = torch::randn_like(parameter);
      const double h = 1e-5;
      parameter.add_(direction, h);
      const double above = loss().item<double>();
      parameter.add_(direction, -2 * h);
      const double below = loss().item<double>();
      parameter.add_(direction, h);
      const double slope = (gradients[i] * direction).sum().item<double>();
      EXPECT_NEAR(slope, (above - below) / (2 * h), 1e-7 + 1e-5 * std::abs(slope))
          << "parameter " << i << " of " << layers << " layers";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Arms, EveryArm, ::testing::ValuesIn(arm_names()),
                         [](const auto& info) { return info.param; });

TEST(SequenceClassifier, HasTheScriptsSizesAndFirstValues) {
  const SequenceClassifier model(arm_named("efla"), ClassifierShape(), 5, at::kFloat);
  int64_t count = 0;
  for (const at::Tensor& p : model.parameters()) count += p.numel();
  // embed 64, position 784 * 64, q k v 3 * 64^2, beta 65, LayerNorm 128, head 650.
  EXPECT_EQ(count, 64 + 784 * 64 + 3 * 64 * 64 + 65 + 128 + 650);
  EXPECT_NEAR(model.parameters()[1].std().item<double>(), 0.02, 0.001);
  const at::Tensor& k = model.parameters()[3];  // Xavier: U(-sqrt(6 / 128), sqrt(6 / 128))
  EXPECT_NEAR(k.abs().max().item<double>(), std::sqrt(6.0 / 128), 0.01);
  EXPECT_NEAR(k.std().item<double>(), std::sqrt(6.0 / 128 / 3), 0.005);
  EXPECT_EQ(model.parameters()[6].item<float>(), -2.0f);
}

TEST(SequenceClassifier, ArmsShareTheirFirstValues) {
  const SequenceClassifier efla(arm_named("efla"), small_shape(2), 5, at::kFloat);
  const SequenceClassifier other(arm_named("efla"), small_shape(2), 6, at::kFloat);
  EXPECT_FALSE(torch::equal(efla.parameters()[0], other.parameters()[0]));
  for (const std::string& name : arm_names()) {
    if (name == "mamba2") continue;  // its beta has another bias
    const SequenceClassifier model(arm_named(name), small_shape(2), 5, at::kFloat);
    for (size_t i = 0; i < efla.parameters().size(); ++i) {
      EXPECT_TRUE(torch::equal(model.parameters()[i], efla.parameters()[i])) << name << " " << i;
    }
  }
}

TEST(Arms, AnUnknownOneIsNamedWithTheNearest) {
  EXPECT_MENTIONS(testing::error_of([] { arm_named("deltnet"); }), "did you mean 'deltanet'?");
}

}  // namespace
}  // namespace efla
