#include "efla/eval/perplexity.h"

#include <gtest/gtest.h>

#include <cmath>

#include "efla/eval/test_models.h"
#include "efla/io/error.h"

namespace efla {
namespace {

constexpr int64_t kVocab = 29;
constexpr int64_t kPrefix = 1;

EvalDocument random_document(int64_t tokens, int64_t words = 3, int64_t bytes = 17) {
  return {torch::randint(kVocab, {tokens}, at::kLong), words, bytes};
}

EvalData random_data(const std::vector<int64_t>& lengths) {
  torch::manual_seed(5);
  EvalData data;
  data.prefix_token = kPrefix;
  for (const int64_t length : lengths) data.documents.push_back(random_document(length));
  return data;
}

// -sum log p of the last `scored` targets, from one plain forward call in float64 log-softmax.
double nll_of(LanguageModel& model, const std::vector<int64_t>& inputs,
              const std::vector<int64_t>& targets) {
  const torch::NoGradGuard no_grad;
  const at::Tensor ids = torch::tensor(inputs, at::kLong).unsqueeze(0);
  const at::Tensor log_p = model->forward(ids)[0].to(at::kDouble).log_softmax(-1);
  double sum = 0;
  const size_t offset = inputs.size() - targets.size();
  for (size_t i = 0; i < targets.size(); ++i) {
    sum -= log_p[static_cast<int64_t>(offset + i)][targets[i]].item<double>();
  }
  return sum;
}

std::vector<int64_t> tokens_of(const EvalDocument& document) {
  const int64_t* ids = document.tokens.const_data_ptr<int64_t>();
  return {ids, ids + document.tokens.numel()};
}

std::vector<int64_t> slice(const std::vector<int64_t>& v, int64_t begin, int64_t end) {
  return {v.begin() + begin, v.begin() + end};
}

// The rolling convention stated in its own words: first [prefix] + tokens[:n-1] -> tokens[:n]; then
// each next group of at most L targets, from the L inputs that end just before its last target.
double rolling_nll(LanguageModel& model, const EvalData& data, int64_t window) {
  double sum = 0;
  for (const EvalDocument& document : data.documents) {
    const std::vector<int64_t> tokens = tokens_of(document);
    const auto total = static_cast<int64_t>(tokens.size());
    if (total == 0) continue;
    const int64_t first = std::min(window, total);
    std::vector<int64_t> inputs = {kPrefix};
    for (int64_t i = 0; i + 1 < first; ++i) inputs.push_back(tokens[static_cast<size_t>(i)]);
    sum += nll_of(model, inputs, slice(tokens, 0, first));
    for (int64_t predicted = first; predicted < total;) {
      const int64_t scored = std::min(total - predicted, window);
      const int64_t end = predicted + scored;
      sum += nll_of(model, slice(tokens, end - window - 1, end - 1), slice(tokens, predicted, end));
      predicted = end;
    }
  }
  return sum;
}

double whole_document_nll(LanguageModel& model, const EvalData& data) {
  double sum = 0;
  for (const EvalDocument& document : data.documents) {
    const std::vector<int64_t> tokens = tokens_of(document);
    if (tokens.empty()) continue;
    std::vector<int64_t> inputs = {kPrefix};
    inputs.insert(inputs.end(), tokens.begin(), tokens.end() - 1);
    sum += nll_of(model, inputs, tokens);
  }
  return sum;
}

TEST(RollingWindows, AreLmEvalsForATinyCase) {
  const std::vector<Window> windows = rolling_windows({10, 0, 3, 4, 5}, 4);
  const std::vector<std::vector<int64_t>> expected = {
      {0, -1, 4, 4},  // inputs prefix 0 1 2    -> 0 1 2 3
      {0, 3, 4, 4},   // inputs 3 4 5 6         -> 4 5 6 7
      {0, 5, 4, 2},   // inputs 5 6 7 8         -> 8 9 (reaches back to be 4 long)
      {2, -1, 3, 3}, {3, -1, 4, 4}, {4, -1, 4, 4}, {4, 0, 4, 1},  // inputs 0 1 2 3          -> 4
  };
  ASSERT_EQ(windows.size(), expected.size());
  for (size_t i = 0; i < windows.size(); ++i) {
    const Window& w = windows[i];
    EXPECT_EQ((std::vector<int64_t>{w.document, w.begin, w.length, w.scored}), expected[i])
        << "window " << i;
  }
  EXPECT_THROW(rolling_windows({3}, 0), UsageError);
}

TEST(RollingWindows, PredictEveryTokenOnce) {
  for (const int64_t window : {1, 2, 3, 7, 50}) {
    for (int64_t count = 0; count < 40; ++count) {
      int64_t next = 0;  // the target that must come next
      for (const Window& w : rolling_windows({count}, window)) {
        EXPECT_LE(w.length, window);
        EXPECT_GE(w.begin, -1);
        EXPECT_EQ(w.begin + w.length + 1 - w.scored, next);
        next += w.scored;
      }
      EXPECT_EQ(next, count);
    }
  }
}

TEST(Perplexity, UniformModelHasThePerplexityOfItsVocabulary) {
  LanguageModel model = testing::uniform_model(kVocab);
  const EvalData data = random_data({12, 0, 30});
  for (const Perplexity& result :
       {stateful_perplexity(model, data), windowed_perplexity(model, data, 8)}) {
    EXPECT_EQ(result.tokens, 42);
    EXPECT_EQ(result.words, 9);
    EXPECT_EQ(result.bytes, 51);
    EXPECT_EQ(result.documents, 3);
    EXPECT_NEAR(result.nll, 42 * std::log(29.0), 1e-4);
    EXPECT_NEAR(result.token_perplexity(), 29.0, 1e-4);
    EXPECT_NEAR(result.word_perplexity(), std::pow(29.0, 42.0 / 9.0), 100);
    EXPECT_NEAR(result.byte_perplexity(), std::pow(29.0, 42.0 / 51.0), 1e-3);
    EXPECT_NEAR(result.bits_per_byte(), 42.0 / 51.0 * std::log2(29.0), 1e-6);
  }
}

TEST(Perplexity, ChainModelIsCertainOfWhatFollows) {
  LanguageModel model = testing::chain_model(kVocab, [](int64_t t) { return (t + 1) % kVocab; });
  EvalData data;
  data.prefix_token = 4;
  data.documents.push_back({torch::arange(5, 25), 1, 1});
  EXPECT_NEAR(stateful_perplexity(model, data).nll, 0, 1e-4);
  EXPECT_NEAR(windowed_perplexity(model, data, 6).nll, 0, 1e-4);
  data.documents[0].tokens[10] = 0;  // one wrong token: it, and what comes after it, are surprises
  EXPECT_GT(stateful_perplexity(model, data).nll, 50);
}

TEST(Perplexity, MetricsAreNamed) {
  LanguageModel model = testing::uniform_model(kVocab);
  const EvalData data = random_data({5});
  EXPECT_EQ(stateful_perplexity(model, data).metric, "stateful");
  EXPECT_EQ(windowed_perplexity(model, data, 128).metric, "windows-128");
}

TEST(Perplexity, StatefulEqualsOneForwardOfEachDocument) {
  LanguageModel model = testing::random_model(kVocab);
  const EvalData data = random_data({7, 150, 1, 0, 149, 80, 33});
  const double expected = whole_document_nll(model, data);
  const Perplexity result = stateful_perplexity(model, data);
  EXPECT_EQ(result.tokens, 420);
  EXPECT_NEAR(result.nll, expected, 1e-5 * expected);
}

TEST(Perplexity, WindowsEqualTheBruteForce) {
  LanguageModel model = testing::random_model(kVocab);
  const EvalData data = random_data({7, 150, 1, 0, 64, 80, 33});
  for (const int64_t window : {1, 5, 32, 64, 1000}) {
    const double expected = rolling_nll(model, data, window);
    EXPECT_NEAR(windowed_perplexity(model, data, window).nll, expected, 1e-5 * expected) << window;
  }
}

TEST(Perplexity, TheTwoConventionsDiffer) {
  LanguageModel model = testing::random_model(kVocab);
  const EvalData data = random_data({200});
  const double stateful = stateful_perplexity(model, data).nll;
  EXPECT_GT(std::abs(windowed_perplexity(model, data, 16).nll - stateful), 1e-3 * stateful);
  // One window that holds the whole document is the same as carrying the state through it.
  EXPECT_NEAR(windowed_perplexity(model, data, 200).nll, stateful, 1e-5 * stateful);
}

TEST(Perplexity, DoesNotDependOnTheBatchSize) {
  LanguageModel model = testing::random_model(kVocab);
  const EvalData data = random_data({700, 701, 360, 5, 5, 6, 0, 1, 90, 400});
  const double stateful = stateful_perplexity(model, data).nll;
  const double windows = windowed_perplexity(model, data, 50).nll;
  for (const int64_t batch_tokens : {1, 7, 64, 600, 1 << 20}) {
    PerplexityOptions options;
    options.batch_tokens = batch_tokens;
    EXPECT_NEAR(stateful_perplexity(model, data, options).nll, stateful, 1e-5 * stateful);
    EXPECT_NEAR(windowed_perplexity(model, data, 50, options).nll, windows, 1e-5 * windows);
  }
}

TEST(Perplexity, WithoutAPrefixTheFirstTokenIsAUniformGuess) {
  LanguageModel model = testing::random_model(kVocab);
  EvalData data = random_data({20});
  data.prefix_token.reset();
  const std::vector<int64_t> tokens = tokens_of(data.documents[0]);
  const double expected =
      std::log(29.0) + nll_of(model, slice(tokens, 0, 19), slice(tokens, 1, 20));
  const Perplexity result = stateful_perplexity(model, data);
  EXPECT_EQ(result.tokens, 20);
  EXPECT_NEAR(result.nll, expected, 1e-5 * expected);
  EXPECT_NEAR(windowed_perplexity(model, data, 100).nll, expected, 1e-5 * expected);
}

TEST(Perplexity, ProgressEndsAtAllTokens) {
  LanguageModel model = testing::uniform_model(kVocab);
  const EvalData data = random_data({300, 20});
  int64_t last = 0;
  PerplexityOptions options;
  options.batch_tokens = 64;
  options.progress = [&last](int64_t done, int64_t total) {
    EXPECT_GE(done, last);
    EXPECT_EQ(total, 320);
    last = done;
  };
  stateful_perplexity(model, data, options);
  EXPECT_EQ(last, 320);
  last = 0;
  windowed_perplexity(model, data, 7, options);
  EXPECT_EQ(last, 320);
}

TEST(Perplexity, RefusesWhatItCannotScore) {
  LanguageModel model = testing::uniform_model(kVocab);
  EXPECT_THROW(stateful_perplexity(model, random_data({0})), Error);
  EXPECT_THROW(stateful_perplexity(model, EvalData{}), Error);
  EvalData data = random_data({4});
  EXPECT_THROW(windowed_perplexity(model, data, 0), UsageError);
  PerplexityOptions options;
  options.batch_tokens = 0;
  EXPECT_THROW(stateful_perplexity(model, data, options), UsageError);
  data.documents[0].tokens[2] = kVocab;
  EXPECT_THROW(stateful_perplexity(model, data), Error);
  data.documents[0].tokens[2] = -1;
  EXPECT_THROW(windowed_perplexity(model, data, 8), Error);
}

TEST(Perplexity, NotFiniteWeightsAreReported) {
  LanguageModel model = testing::random_model(kVocab);
  {
    const torch::NoGradGuard no_grad;
    model->head_weight()[3][2] = std::nan("");
  }
  EXPECT_THROW(stateful_perplexity(model, random_data({10})), Error);
}

}  // namespace
}  // namespace efla
