// Every family on a GPU: logits, loss, gradients, packed documents and decoding against the same
// model in float64 on the CPU.
#include <gtest/gtest.h>

#include "efla/nn/test_support.h"

namespace efla {
namespace {

using namespace testing_support;

class OnGpu : public ::testing::TestWithParam<Variant> {
 protected:
  void SetUp() override {
    if (!at::hasCUDA() || !torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device here";
  }
  const ModelConfig& config() const { return GetParam().config; }

  // The same weights on the GPU.
  LanguageModel to_gpu(const LanguageModel& source, at::ScalarType dtype = at::kFloat) const {
    LanguageModel model(config(), at::TensorOptions().dtype(dtype).device(at::kCUDA),
                        WeightInit::kNone);
    const torch::NoGradGuard no_grad;
    const auto values = source->named_parameters();
    for (auto& p : model->named_parameters()) p.value().copy_(values[p.key()]);
    return model;
  }
  static at::Tensor offsets(const std::vector<int64_t>& lengths) {
    std::vector<int64_t> sums = {0};
    for (const int64_t length : lengths) sums.push_back(sums.back() + length);
    return at::tensor(sums, at::kLong);
  }
  static double error(const at::Tensor& found, const at::Tensor& expected) {
    return relative_error(found.detach().cpu(), expected);
  }
};
INSTANTIATE_TEST_SUITE_P(Nn, OnGpu, ::testing::ValuesIn(variants()), variant_name);

TEST_P(OnGpu, LogitsLossAndGradients) {
  LanguageModel exact = random_model(config(), at::kDouble);
  LanguageModel model = to_gpu(exact);
  const at::Tensor ids = random_tokens(config(), 2, 150);
  at::Tensor targets = random_tokens(config(), 2, 150, 11);
  targets.narrow(1, 140, 10).fill_(kIgnoreTarget);
  EXPECT_LT(error(model->forward(ids.cuda()), exact->forward(ids)), 2e-5);
  const LossSum found = model->loss(ids.cuda(), targets.cuda()),
                expected = exact->loss(ids, targets);
  EXPECT_EQ(found.count, expected.count);
  EXPECT_LT(error(found.nll, expected.nll), 1e-5);
  found.nll.backward();
  expected.nll.backward();
  const auto gradients = exact->named_parameters();
  for (const auto& p : model->named_parameters()) {
    EXPECT_LT(error(p.value().grad(), gradients[p.key()].grad()), 1e-3) << p.key();
  }
}

TEST_P(OnGpu, Bfloat16) {
  LanguageModel rounded = random_model(config(), at::kBFloat16);
  LanguageModel model = to_gpu(rounded, at::kBFloat16);
  LanguageModel exact = copy_model(rounded, config(), at::kDouble);
  const at::Tensor ids = random_tokens(config(), 2, 150);
  EXPECT_LT(error(model->forward(ids.cuda()), exact->forward(ids)), 5e-2);
  model->loss(ids.cuda(), ids.cuda()).nll.backward();
  for (const auto& p : model->named_parameters()) {
    EXPECT_TRUE(p.value().grad().isfinite().all().item<bool>()) << p.key();
  }
}

TEST_P(OnGpu, PackedPromptsThenTokenByToken) {
  const torch::NoGradGuard no_grad;
  LanguageModel exact = random_model(config(), at::kDouble);
  LanguageModel model = to_gpu(exact);
  const at::Tensor ids = random_tokens(config(), 2, 100);
  const auto piece = [&](int64_t row, int64_t start, int64_t end) {
    return ids.narrow(0, row, 1).narrow(1, start, end - start);
  };
  Cache cache;
  const at::Tensor prompts = at::cat({piece(0, 0, 90), piece(1, 0, 33)}, 1);
  std::vector<at::Tensor> first, second;
  const at::Tensor packed = model->forward(prompts.cuda(), offsets({90, 33}).cuda(), &cache);
  first.push_back(packed.narrow(1, 0, 90));
  second.push_back(packed.narrow(1, 90, 33));
  for (int64_t i = 0; i < 10; ++i) {
    const at::Tensor token = at::cat({piece(0, 90 + i, 91 + i), piece(1, 33 + i, 34 + i)}, 0);
    const at::Tensor logits = model->forward(token.cuda(), {}, &cache);
    first.push_back(logits.narrow(0, 0, 1));
    second.push_back(logits.narrow(0, 1, 1));
  }
  EXPECT_LT(error(at::cat(first, 1), exact->forward(piece(0, 0, 100))), 2e-5);
  EXPECT_LT(error(at::cat(second, 1), exact->forward(piece(1, 0, 43))), 2e-5);
}

}  // namespace
}  // namespace efla
