#include "efla/nn/loss.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "efla/nn/test_support.h"

namespace efla {
namespace {

using testing_support::relative_error;

struct Problem {
  at::Tensor hidden, weight, targets;
};

// Rows of hidden size 6; every third target is ignored.
Problem problem(int64_t rows, int64_t vocab, at::ScalarType dtype) {
  torch::manual_seed(3);
  const auto options = at::TensorOptions().dtype(at::kDouble);
  Problem p{at::randn({rows, 6}, options), at::randn({vocab, 6}, options),
            at::randint(vocab, {rows}, at::TensorOptions().dtype(at::kLong))};
  p.targets.slice(0, 0, rows, 3).fill_(kIgnoreTarget);
  p.hidden = p.hidden.to(dtype).requires_grad_();
  p.weight = p.weight.to(dtype).requires_grad_();
  return p;
}

at::Tensor reference(const at::Tensor& hidden, const at::Tensor& weight,
                     const at::Tensor& targets) {
  const at::Tensor log_probs =
      at::log_softmax(hidden.to(at::kDouble).matmul(weight.to(at::kDouble).t()), -1);
  const at::Tensor kept = targets.ne(kIgnoreTarget).nonzero().squeeze(-1);
  return log_probs.index({kept, targets.index({kept})}).neg().sum();
}

// One block, and several with a ragged last one.
class LinearCrossEntropy : public ::testing::TestWithParam<std::pair<int64_t, int64_t>> {};
INSTANTIATE_TEST_SUITE_P(Nn, LinearCrossEntropy,
                         ::testing::Values(std::pair(10, 7), std::pair(600, 9000)));

TEST_P(LinearCrossEntropy, ValueAndGradients) {
  const auto [rows, vocab] = GetParam();
  for (const auto& [dtype, tolerance] :
       {std::pair(at::kDouble, 1e-12), std::pair(at::kFloat, 1e-5)}) {
    const Problem p = problem(rows, vocab, dtype), expected = problem(rows, vocab, dtype);
    const LossSum loss = linear_cross_entropy(p.hidden, p.weight, p.targets);
    const at::Tensor sum = reference(expected.hidden, expected.weight, expected.targets);
    EXPECT_EQ(loss.count, rows - (rows + 2) / 3);
    EXPECT_EQ(loss.nll.scalar_type(), dtype);
    EXPECT_LT(relative_error(loss.nll, sum), tolerance);
    (loss.nll / loss.count * 2).backward();
    (sum / loss.count * 2).backward();
    EXPECT_LT(relative_error(p.hidden.grad(), expected.hidden.grad()), tolerance);
    EXPECT_LT(relative_error(p.weight.grad(), expected.weight.grad()), tolerance);
  }
}

TEST_P(LinearCrossEntropy, TokenNllSumsToIt) {
  const auto [rows, vocab] = GetParam();
  const Problem p = problem(rows, vocab, at::kFloat);
  const at::Tensor nll =
      token_nll(p.hidden.view({2, rows / 2, 6}), p.weight, p.targets.view({2, rows / 2}));
  EXPECT_EQ(nll.sizes(), at::IntArrayRef({2, rows / 2}));
  EXPECT_FALSE(nll.requires_grad());
  EXPECT_LT(relative_error(nll.sum(), reference(p.hidden, p.weight, p.targets)), 1e-6);
  EXPECT_EQ(nll.view({-1})[0].item<float>(), 0);  // ignored
  EXPECT_GT(nll.view({-1})[1].item<float>(), 0);
}

TEST(LinearCrossEntropyOnce, Bfloat16IsSummedInFloat32) {
  const Problem p = problem(100, 50, at::kBFloat16);
  const LossSum loss = linear_cross_entropy(p.hidden, p.weight, p.targets);
  EXPECT_EQ(loss.nll.scalar_type(), at::kFloat);
  const Problem wide = problem(100, 50, at::kBFloat16);
  const at::Tensor sum = reference(wide.hidden, wide.weight, wide.targets);
  EXPECT_LT(relative_error(loss.nll, sum), 1e-2);
  loss.nll.backward();
  sum.backward();
  EXPECT_EQ(p.weight.grad().scalar_type(), at::kBFloat16);
  EXPECT_LT(relative_error(p.weight.grad(), wide.weight.grad()), 2e-2);
  EXPECT_LT(relative_error(p.hidden.grad(), wide.hidden.grad()), 2e-2);
}

TEST(LinearCrossEntropyOnce, OnlyWhatIsWantedGetsAGradient) {
  const Problem p = problem(20, 9, at::kFloat);
  linear_cross_entropy(p.hidden.detach(), p.weight, p.targets).nll.backward();
  EXPECT_TRUE(p.weight.grad().defined());
  EXPECT_FALSE(p.hidden.grad().defined());
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(linear_cross_entropy(p.hidden, p.weight, p.targets).nll.requires_grad());
}

TEST(LinearCrossEntropyOnce, BackwardTwiceAddsTwice) {
  const Problem p = problem(20, 9, at::kDouble);
  const at::Tensor nll = linear_cross_entropy(p.hidden, p.weight, p.targets).nll;
  nll.backward({}, /*retain_graph=*/true);
  const at::Tensor once = p.weight.grad().clone();
  nll.backward();
  EXPECT_LT(relative_error(p.weight.grad(), once * 2), 1e-14);
}

TEST(Loss, NothingToPredictIsZeroWithZeroGradients) {
  Problem p = problem(20, 9, at::kFloat);
  p.targets.fill_(kIgnoreTarget);
  const LossSum loss = linear_cross_entropy(p.hidden, p.weight, p.targets);
  EXPECT_EQ(loss.count, 0);
  EXPECT_EQ(loss.nll.item<float>(), 0);
  loss.nll.backward();
  EXPECT_EQ(p.weight.grad().norm().item<float>(), 0);
  const Problem none = problem(0, 9, at::kFloat);
  EXPECT_EQ(linear_cross_entropy(none.hidden, none.weight, none.targets).nll.item<float>(), 0);
}

TEST(Loss, HugeLogitsStayFinite) {
  Problem p = problem(20, 9, at::kFloat);
  const at::Tensor weight = (p.weight.detach() * 1e6).requires_grad_();
  const LossSum loss = linear_cross_entropy(p.hidden, weight, p.targets);
  EXPECT_TRUE(std::isfinite(loss.nll.item<float>()));
  loss.nll.backward();
  EXPECT_TRUE(p.hidden.grad().isfinite().all().item<bool>());
}

TEST(Loss, RefusesTargetsThatDoNotFit) {
  Problem p = problem(20, 9, at::kFloat);
  EXPECT_THROW(linear_cross_entropy(p.hidden, p.weight, p.targets.to(at::kInt)), c10::Error);
  EXPECT_THROW(linear_cross_entropy(p.hidden, p.weight, p.targets.slice(0, 1)), c10::Error);
  EXPECT_THROW(linear_cross_entropy(p.hidden.slice(1, 1), p.weight, p.targets), c10::Error);
  for (const int64_t bad : {int64_t{9}, int64_t{-1}, int64_t{-99}}) {
    p.targets[4] = bad;
    EXPECT_THROW(linear_cross_entropy(p.hidden, p.weight, p.targets), c10::Error) << bad;
    EXPECT_THROW(token_nll(p.hidden, p.weight, p.targets), c10::Error) << bad;
  }
}

}  // namespace
}  // namespace efla
