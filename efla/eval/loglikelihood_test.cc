#include "efla/eval/loglikelihood.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "efla/eval/packed_reader.h"
#include "efla/eval/positions.h"
#include "efla/eval/test_models.h"
#include "efla/io/error.h"

namespace efla {
namespace {

using testing::chain_model;
using testing::random_model;
using testing::uniform_model;

constexpr int64_t kVocab = 50;

std::vector<int32_t> random_tokens(std::mt19937& random, size_t count) {
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % kVocab);
  return tokens;
}

// Questions of several lengths, some with choices of one token, one whose choices begin alike, and
// one whose contexts have nothing in common.
std::vector<RequestGroup> questions() {
  std::mt19937 random(3);
  std::vector<RequestGroup> groups;
  for (const size_t length : {1, 2, 20, 63, 64, 65, 130, 200}) {
    const std::vector<int32_t> context = random_tokens(random, length);
    RequestGroup group;
    for (const size_t choice : {1, 1, 3, 17}) {
      group.push_back({context, random_tokens(random, choice)});
    }
    group.push_back(group[3]);
    group.back().continuation.back() = (group.back().continuation.back() + 1) % kVocab;
    groups.push_back(group);
  }
  groups.push_back({{random_tokens(random, 30), {1, 2}}, {random_tokens(random, 40), {1, 2}}});
  groups.push_back({});
  return groups;
}

// What the definition says, one request at a time through the whole model.
Likelihood by_definition(LanguageModel& model, const LikelihoodRequest& request) {
  std::vector<int64_t> tokens(request.context.begin(), request.context.end());
  tokens.insert(tokens.end(), request.continuation.begin(), request.continuation.end());
  const torch::NoGradGuard no_grad;
  const at::Tensor logits = model->forward(torch::tensor(tokens, at::kLong).unsqueeze(0))[0];
  Likelihood result;
  for (size_t i = request.context.size(); i < tokens.size(); ++i) {
    const at::Tensor log_probs = logits[static_cast<int64_t>(i) - 1].log_softmax(0);
    result.log += log_probs[tokens[i]].item<double>();
    result.greedy = result.greedy && log_probs.argmax().item<int64_t>() == tokens[i];
  }
  return result;
}

TEST(Likelihoods, AreThoseOfTheDefinition) {
  LanguageModel model = random_model(kVocab);
  const std::vector<RequestGroup> groups = questions();
  LikelihoodOptions separate;
  separate.share_contexts = false;
  const auto shared_results = likelihoods(model, groups);
  const auto separate_results = likelihoods(model, groups, separate);
  ASSERT_EQ(shared_results.size(), groups.size());
  ASSERT_EQ(separate_results.size(), groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    ASSERT_EQ(shared_results[g].size(), groups[g].size());
    for (size_t i = 0; i < groups[g].size(); ++i) {
      const Likelihood expected = by_definition(model, groups[g][i]);
      for (const auto& results : {shared_results, separate_results}) {
        EXPECT_NEAR(results[g][i].log, expected.log, 1e-4) << g << " " << i;
        EXPECT_EQ(results[g][i].greedy, expected.greedy);
      }
    }
  }
}

TEST(Likelihoods, DoNotDependOnTheBatch) {
  LanguageModel model = random_model(kVocab);
  const std::vector<RequestGroup> groups = questions();
  const auto reference = likelihoods(model, groups);
  for (const int64_t batch_tokens : {1, 70, 300, 1 << 20}) {
    LikelihoodOptions options;
    options.batch_tokens = batch_tokens;
    const auto results = likelihoods(model, groups, options);
    for (size_t g = 0; g < groups.size(); ++g) {
      for (size_t i = 0; i < groups[g].size(); ++i) {
        // To the last bit with the matrix products of most CPUs, which no one promises.
        EXPECT_NEAR(results[g][i].log, reference[g][i].log,
                    1e-6 + 1e-7 * groups[g][i].context.size())
            << batch_tokens << " " << g << " " << i;
        EXPECT_EQ(results[g][i].greedy, reference[g][i].greedy);
      }
    }
  }
}

TEST(Likelihoods, SharedContextsAreReadOnce) {
  LanguageModel model = uniform_model(kVocab);
  const std::vector<int32_t> context(100, 7);
  const std::vector<RequestGroup> groups = {
      {{context, {1, 2}}, {context, {3, 4, 5}}, {context, {6}}}};
  LikelihoodCost cost;
  const auto results = likelihoods(model, groups, {}, &cost);
  EXPECT_EQ(cost.tokens_requested, 101 + 102 + 100);
  EXPECT_EQ(cost.tokens_read, 100 + 1 + 2 + 0);
  EXPECT_NEAR(results[0][1].log, -3 * std::log(kVocab), 1e-5);
  LikelihoodOptions separate;
  separate.share_contexts = false;
  likelihoods(model, groups, separate, &cost);
  EXPECT_EQ(cost.tokens_read, cost.tokens_requested);
}

TEST(Likelihoods, KnowsTheGreedyContinuation) {
  LanguageModel model = chain_model(kVocab, [](int64_t t) { return (t + 1) % kVocab; });
  const auto results =
      likelihoods(model, {{{{3}, {4, 5, 6}}, {{3}, {4, 5, 7}}, {{3, 49}, {0}}, {{3}, {3}}}});
  const std::vector<bool> expected = {true, false, true, false};
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(results[0][i].greedy, expected[i]) << i;
}

TEST(Likelihoods, ReportsEachGroupOnce) {
  const std::vector<RequestGroup> groups = questions();
  std::vector<int> seen(groups.size());
  LikelihoodOptions options;
  options.batch_tokens = 100;
  LikelihoodProgress last;
  options.on_group = [&](size_t group, const GroupLikelihoods& scores) {
    ++seen[group];
    EXPECT_EQ(scores.size(), groups[group].size());
  };
  options.progress = [&](const LikelihoodProgress& now) {
    EXPECT_GE(now.groups_done, last.groups_done);
    EXPECT_GT(now.tokens_done, last.tokens_done);
    last = now;
  };
  likelihoods(random_model(kVocab), groups, options);
  EXPECT_EQ(seen, std::vector<int>(groups.size(), 1));
  EXPECT_EQ(last.groups_done, static_cast<int64_t>(groups.size()));
  EXPECT_EQ(last.tokens_done, last.tokens);
}

TEST(Likelihoods, LongContextsAreReadInPieces) {
  std::mt19937 random(5);
  LanguageModel model = random_model(kVocab);
  const LikelihoodRequest request{random_tokens(random, 9000), random_tokens(random, 5)};
  LikelihoodOptions options;
  options.batch_tokens = 100;
  const auto pieces = likelihoods(model, {{request}}, options);
  EXPECT_NEAR(pieces[0][0].log, by_definition(model, request).log, 1e-3);
}

TEST(Likelihoods, RefusesBadRequests) {
  LanguageModel model = random_model(kVocab);
  EXPECT_THROW(likelihoods(model, {{{{}, {1}}}}), Error);
  EXPECT_THROW(likelihoods(model, {{{{1}, {}}}}), Error);
  EXPECT_THROW(likelihoods(model, {{{{1}, {kVocab}}}}), Error);
  EXPECT_THROW(likelihoods(model, {{{{-1}, {1}}}}), Error);
  LikelihoodOptions options;
  options.batch_tokens = 0;
  EXPECT_THROW(likelihoods(model, {{{{1}, {1}}}}, options), UsageError);
  const torch::NoGradGuard no_grad;
  model->head_weight().fill_(std::nan(""));
  EXPECT_THROW(likelihoods(model, {{{{1}, {1}}}}), Error);
}

EvalData data_of(const std::vector<std::vector<int32_t>>& documents) {
  EvalData data;
  data.prefix_token = 0;
  for (const auto& tokens : documents) {
    data.documents.push_back({torch::tensor(tokens, at::kInt).to(at::kLong), 1, 1});
  }
  return data;
}

TEST(Positions, CarryTheStateThroughASegment) {
  std::mt19937 random(9);
  const std::vector<int32_t> tokens = random_tokens(random, 650);
  LanguageModel model = random_model(kVocab);
  PerplexityOptions options;
  options.batch_tokens = 50;  // several pieces
  const PositionLoss loss = position_loss(model, data_of({tokens}), 300, options);
  EXPECT_EQ(loss.segments, 2);        // 50 tokens are left over
  ASSERT_EQ(loss.ranges.size(), 4u);  // 64, 128, 256, 300
  EXPECT_EQ(loss.ranges[3].begin, 256);
  EXPECT_EQ(loss.ranges[3].end, 300);
  // The same tokens as two documents of their own.
  const EvalData halves = data_of(
      {{tokens.begin(), tokens.begin() + 300}, {tokens.begin() + 300, tokens.begin() + 600}});
  double sum = 0;
  for (const PositionRange& range : loss.ranges) {
    sum += range.loss * static_cast<double>(range.end - range.begin);
    ASSERT_TRUE(range.error);
  }
  EXPECT_NEAR(2 * sum, stateful_perplexity(model, halves).nll, 1e-2);
}

TEST(Positions, NeedsALongDocument) {
  const EvalData data = data_of({std::vector<int32_t>(100, 1)});
  EXPECT_THROW(position_loss(uniform_model(kVocab), data, 101), UsageError);
  const PositionLoss loss = position_loss(uniform_model(kVocab), data, 100);
  EXPECT_EQ(loss.segments, 1);
  EXPECT_FALSE(loss.ranges[0].error);
  EXPECT_NEAR(loss.ranges[1].loss, std::log(kVocab), 1e-5);
}

}  // namespace
}  // namespace efla
