#include "efla/eval/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "efla/io/error.h"

namespace efla {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<int32_t> tokens_of(const std::vector<Candidate>& candidates) {
  std::vector<int32_t> tokens;
  for (const Candidate& candidate : candidates) tokens.push_back(candidate.token);
  return tokens;
}

SamplingOptions with(double temperature, int64_t top_k = 0, double top_p = 1, double penalty = 1) {
  SamplingOptions options;
  options.temperature = temperature;
  options.top_k = top_k;
  options.top_p = top_p;
  options.repetition_penalty = penalty;
  return options;
}

TEST(Sampler, GreedyTakesTheHighestLogitAndTheLowestIdOfEquals) {
  Sampler sampler(with(0));
  const std::vector<float> logits = {0.5f, 2.0f, -1.0f, 2.0f};
  for (int i = 0; i < 5; ++i) EXPECT_EQ(sampler.sample(logits), 1);
}

TEST(Sampler, DistributionIsTheSoftmaxOfLogitsOverTemperature) {
  const std::vector<float> logits = {1.0f, 0.0f, 3.0f};
  const double t = 2.0;
  const double total = std::exp(1.0 / t) + std::exp(0.0) + std::exp(3.0 / t);
  const std::vector<Candidate> candidates = Sampler(with(t)).distribution(logits);
  ASSERT_EQ(tokens_of(candidates), (std::vector<int32_t>{2, 0, 1}));
  EXPECT_NEAR(candidates[0].probability, std::exp(3.0 / t) / total, 1e-12);
  EXPECT_NEAR(candidates[1].probability, std::exp(1.0 / t) / total, 1e-12);
  EXPECT_NEAR(candidates[2].probability, 1.0 / total, 1e-12);
}

TEST(Sampler, HugeLogitsStayFinite) {
  const std::vector<float> logits = {3e38f, -3e38f, 3e38f};
  const std::vector<Candidate> candidates = Sampler(with(0.5)).distribution(logits);
  EXPECT_NEAR(candidates[0].probability, 0.5, 1e-12);
  EXPECT_NEAR(candidates[1].probability, 0.5, 1e-12);
}

// Pearson's statistic of draws against a distribution over the same tokens.
double chi_square(const std::map<int32_t, int>& counts, const std::vector<Candidate>& expected,
                  int draws) {
  double statistic = 0;
  for (const Candidate& candidate : expected) {
    const double mean = candidate.probability * draws;
    const auto found = counts.find(candidate.token);
    const double difference = (found == counts.end() ? 0 : found->second) - mean;
    statistic += difference * difference / mean;
  }
  return statistic;
}

TEST(Sampler, DrawsFollowTheDistribution) {
  const std::vector<float> logits = {0.3f, -1.2f, 1.1f, 0.0f, 2.0f, -0.5f, 0.9f, -2.0f, 1.5f, 0.6f};
  constexpr int kDraws = 50000;
  // 33.72 is the 0.9999 quantile of chi-square with 9 degrees of freedom.
  constexpr double kLimit = 33.72;
  SamplingOptions options = with(0.7);
  options.seed = 11;
  Sampler sampler(options);
  std::map<int32_t, int> counts;
  for (int i = 0; i < kDraws; ++i) ++counts[sampler.sample(logits)];
  EXPECT_LT(chi_square(counts, Sampler(with(0.7)).distribution(logits), kDraws), kLimit);
  // The test has power: a slightly different temperature is told apart.
  EXPECT_GT(chi_square(counts, Sampler(with(0.75)).distribution(logits), kDraws), kLimit);
}

TEST(Sampler, DrawsFromACutDistributionStayInside) {
  const std::vector<float> logits = {0.0f, 1.0f, 2.0f, 3.0f};
  SamplingOptions options = with(1.5, /*top_k=*/3);
  Sampler sampler(options);
  std::map<int32_t, int> counts;
  constexpr int kDraws = 20000;
  for (int i = 0; i < kDraws; ++i) ++counts[sampler.sample(logits)];
  EXPECT_EQ(counts.count(0), 0u);
  // 18.42 is the 0.9999 quantile with 2 degrees of freedom.
  EXPECT_LT(chi_square(counts, sampler.distribution(logits), kDraws), 18.42);
}

TEST(Sampler, TopKKeepsTheHighestAndTiesOfTheLast) {
  const std::vector<float> logits = {1.0f, 4.0f, 3.0f, 2.0f, 3.0f};
  EXPECT_EQ(tokens_of(Sampler(with(1, 1)).distribution(logits)), (std::vector<int32_t>{1}));
  EXPECT_EQ(tokens_of(Sampler(with(1, 2)).distribution(logits)), (std::vector<int32_t>{1, 2, 4}));
  EXPECT_EQ(tokens_of(Sampler(with(1, 4)).distribution(logits)),
            (std::vector<int32_t>{1, 2, 4, 3}));
  EXPECT_EQ(Sampler(with(1, 99)).distribution(logits).size(), 5u);
}

TEST(Sampler, TopPKeepsTheFewestTokensThatReachP) {
  const std::vector<float> logits(4, 1.0f);  // a quarter each, exactly
  const auto kept = [&logits](double p) {
    return tokens_of(Sampler(with(1, 0, p)).distribution(logits));
  };
  EXPECT_EQ(kept(1e-9), (std::vector<int32_t>{0}));
  EXPECT_EQ(kept(0.25), (std::vector<int32_t>{0}));
  EXPECT_EQ(kept(0.2500001), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(kept(0.5), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(kept(0.7499999), (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(kept(0.7500001), (std::vector<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(kept(1.0), (std::vector<int32_t>{0, 1, 2, 3}));
}

TEST(Sampler, TopPAppliesToWhatTopKLeft) {
  // Weights 8, 4, 2, 1 of 15. After top-k 2 they are 2/3 and 1/3, so p = 0.6 keeps one; without
  // top-k the first has 8/15 = 0.53, so p = 0.6 keeps two.
  const float ln2 = std::log(2.0f);
  const std::vector<float> logits = {3 * ln2, 2 * ln2, ln2, 0.0f};
  EXPECT_EQ(Sampler(with(1, 2, 0.6)).distribution(logits).size(), 1u);
  EXPECT_EQ(Sampler(with(1, 0, 0.6)).distribution(logits).size(), 2u);
}

TEST(Sampler, WhatIsLeftIsNormalised) {
  const std::vector<float> logits = {2.0f, 1.0f, 0.5f, -1.0f, -3.0f};
  for (const SamplingOptions& options : {with(0.8, 3), with(0.8, 0, 0.7), with(2.0, 4, 0.5)}) {
    double sum = 0;
    for (const Candidate& c : Sampler(options).distribution(logits)) sum += c.probability;
    EXPECT_NEAR(sum, 1.0, 1e-12);
  }
}

TEST(Sampler, RepetitionPenaltyDividesPositiveAndMultipliesNegativeLogits) {
  const std::vector<float> logits = {2.0f, -1.0f, 1.5f, 0.25f};
  Sampler sampler(with(1, 0, 1, 1.5));
  sampler.observe(0);
  sampler.observe(1);
  sampler.observe(0);  // a second time changes nothing
  // Expected scores 2/1.5, -1*1.5, 1.5, 0.25.
  const std::vector<Candidate> candidates = sampler.distribution(logits);
  ASSERT_EQ(tokens_of(candidates), (std::vector<int32_t>{2, 0, 3, 1}));
  EXPECT_NEAR(std::log(candidates[0].probability / candidates[1].probability), 1.5 - 2 / 1.5,
              1e-12);
  EXPECT_NEAR(std::log(candidates[0].probability / candidates[3].probability), 1.5 + 1.5, 1e-12);
}

TEST(Sampler, DrawnTokensCountAsSeen) {
  const std::vector<float> logits = {1.0f, 0.9f, 0.8f};
  Sampler sampler(with(0, 0, 1, 2.0));
  EXPECT_EQ(sampler.sample(logits), 0);  // then 0.5, 0.9, 0.8
  EXPECT_EQ(sampler.sample(logits), 1);  // then 0.5, 0.45, 0.8
  EXPECT_EQ(sampler.sample(logits), 2);  // then 0.5, 0.45, 0.4
  EXPECT_EQ(sampler.sample(logits), 0);
}

TEST(Sampler, MinusInfinityIsNeverDrawn) {
  const std::vector<float> logits = {-kInfinity, 0.0f, -kInfinity, -50.0f};
  EXPECT_EQ(tokens_of(Sampler(with(3)).distribution(logits)), (std::vector<int32_t>{1, 3}));
}

// More tokens than are sorted at first, many of them equal.
TEST(Sampler, TopPKeepsTheLikeliestOfManyTokens) {
  std::vector<float> logits;
  for (int i = 0; i < 3000; ++i) logits.push_back(static_cast<float>(i * 7919 % 1000) / 300);
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  double total = 0;
  for (const float logit : logits) total += std::exp(static_cast<double>(logit));
  for (const double p : {0.01, 0.1, 0.5, 0.99}) {
    double kept = 0;
    size_t count = 0;
    while (kept < p * total) kept += std::exp(static_cast<double>(logits[order[count++]]));
    EXPECT_EQ(tokens_of(Sampler(with(1, 0, p)).distribution(logits)),
              std::vector<int32_t>(order.begin(), order.begin() + count))
        << p;
  }
}

TEST(Sampler, SameSeedSameDrawsAndStreamsDiffer) {
  const std::vector<float> logits(50, 0.0f);
  const auto draws = [&logits](uint64_t seed, uint64_t stream) {
    SamplingOptions options;
    options.seed = seed;
    Sampler sampler(options, stream);
    std::vector<int32_t> tokens;
    for (int i = 0; i < 40; ++i) tokens.push_back(sampler.sample(logits));
    return tokens;
  };
  EXPECT_EQ(draws(7, 0), draws(7, 0));
  EXPECT_NE(draws(7, 0), draws(7, 1));
  EXPECT_NE(draws(7, 0), draws(8, 0));
  EXPECT_NE(draws(7, 1), draws(8, 0));
}

TEST(Sampler, BadLogitsAreRefused) {
  Sampler sampler(with(1));
  EXPECT_THROW(sampler.sample(std::vector<float>{0.0f, std::nanf("")}), Error);
  EXPECT_THROW(sampler.sample(std::vector<float>{0.0f, kInfinity}), Error);
  EXPECT_THROW(sampler.sample(std::vector<float>{-kInfinity, -kInfinity}), Error);
}

TEST(Sampler, AbsurdOptionsAreRefused) {
  for (const SamplingOptions& options :
       {with(-0.1), with(std::nan("")), with(HUGE_VAL), with(1, -1), with(1, 0, 0),
        with(1, 0, 1.01), with(1, 0, std::nan("")), with(1, 0, 1, 0), with(1, 0, 1, -2)}) {
    EXPECT_THROW(Sampler{options}, UsageError);
  }
}

}  // namespace
}  // namespace efla
