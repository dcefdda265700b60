// The engine on a GPU against itself on the CPU.
#include <gtest/gtest.h>

#include <random>

#include "efla/eval/loglikelihood.h"
#include "efla/eval/positions.h"
#include "efla/eval/test_models.h"

namespace efla {
namespace {

constexpr int64_t kVocab = 500;

TEST(LikelihoodsOnGpu, AreThoseOfTheCpu) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device here";
  std::mt19937 random(3);
  const auto tokens = [&random](size_t count) {
    std::vector<int32_t> drawn(count);
    for (int32_t& token : drawn) token = static_cast<int32_t>(random() % kVocab);
    return drawn;
  };
  std::vector<RequestGroup> groups;
  for (size_t i = 0; i < 60; ++i) {
    const std::vector<int32_t> context = tokens(1 + 7 * i);
    groups.push_back({{context, tokens(1)}, {context, tokens(4)}, {context, tokens(1 + i)}});
  }
  groups.push_back({{tokens(9000), tokens(3)}});  // in pieces
  LanguageModel model = testing::random_model(kVocab);
  const auto expected = likelihoods(model, groups);
  model->to(at::Device(at::kCUDA, 0));
  for (const int64_t batch_tokens : {500, 8192}) {
    for (const bool share : {true, false}) {
      LikelihoodOptions options;
      options.batch_tokens = batch_tokens;
      options.share_contexts = share;
      const auto found = likelihoods(model, groups, options);
      for (size_t g = 0; g < groups.size(); ++g) {
        for (size_t i = 0; i < groups[g].size(); ++i) {
          EXPECT_NEAR(found[g][i].log, expected[g][i].log,
                      1e-4 + 1e-5 * static_cast<double>(groups[g][i].continuation.size()));
        }
      }
    }
  }
}

TEST(PositionsOnGpu, AreThoseOfTheCpu) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device here";
  LanguageModel model = testing::random_model(kVocab);
  EvalData data;
  data.prefix_token = 0;
  torch::manual_seed(4);
  data.documents.push_back({torch::randint(kVocab, {5000}, at::kLong), 1, 1});
  const PositionLoss expected = position_loss(model, data, 2400);
  model->to(at::Device(at::kCUDA, 0));
  const PositionLoss found = position_loss(model, data, 2400);
  for (size_t i = 0; i < expected.ranges.size(); ++i) {
    EXPECT_NEAR(found.ranges[i].loss, expected.ranges[i].loss, 1e-4);
  }
}

}  // namespace
}  // namespace efla
