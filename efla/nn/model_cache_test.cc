// Packed documents and incremental decoding give what separate whole sequences give.
#include <gtest/gtest.h>

#include "efla/nn/test_support.h"

namespace efla {
namespace {

using namespace testing_support;

constexpr double kTolerance = 1e-5;

at::Tensor offsets(const std::vector<int64_t>& lengths, at::ScalarType dtype = at::kLong) {
  std::vector<int64_t> sums = {0};
  for (const int64_t length : lengths) sums.push_back(sums.back() + length);
  return at::tensor(sums, at::TensorOptions().dtype(dtype));
}

// Feeds `ids` in pieces of the given lengths, the rest in one.
at::Tensor forward_in_pieces(LanguageModel& model, const at::Tensor& ids,
                             const std::vector<int64_t>& pieces, Cache& cache) {
  std::vector<at::Tensor> logits;
  int64_t start = 0;
  for (const int64_t piece : pieces) {
    logits.push_back(model->forward(ids.narrow(1, start, piece), {}, &cache));
    start += piece;
  }
  if (start < ids.size(1)) {
    logits.push_back(model->forward(ids.narrow(1, start, ids.size(1) - start), {}, &cache));
  }
  return at::cat(logits, 1);
}

class CacheOfEveryVariant : public ::testing::TestWithParam<Variant> {
 protected:
  const ModelConfig& config() const { return GetParam().config; }
  torch::NoGradGuard no_grad_;
};
INSTANTIATE_TEST_SUITE_P(Nn, CacheOfEveryVariant, ::testing::ValuesIn(variants()), variant_name);

TEST_P(CacheOfEveryVariant, SplitAnywhereEqualsWhole) {
  LanguageModel model = random_model(config());
  const at::Tensor ids = random_tokens(config(), 2, 75);
  const at::Tensor whole = model->forward(ids);
  const std::vector<std::vector<int64_t>> splits = {
      {1}, {2}, {3}, {64}, {74}, {10, 1, 1, 0, 2, 40}, {1, 1, 1, 65}};
  for (const auto& split : splits) {
    Cache cache;
    const at::Tensor pieces = forward_in_pieces(model, ids, split, cache);
    EXPECT_LT(relative_error(pieces, whole), kTolerance) << ::testing::PrintToString(split);
    EXPECT_EQ(cache.tokens_seen, 75);
    EXPECT_EQ(cache.batch_size(), 2);
  }
}

TEST_P(CacheOfEveryVariant, TokenByTokenEqualsWhole) {
  LanguageModel model = random_model(config());
  const at::Tensor ids = random_tokens(config(), 3, 20);
  Cache cache;
  const at::Tensor steps = forward_in_pieces(model, ids, std::vector<int64_t>(20, 1), cache);
  EXPECT_LT(relative_error(steps, model->forward(ids)), kTolerance);
}

TEST_P(CacheOfEveryVariant, PackedEqualsSeparate) {
  LanguageModel model = random_model(config());
  const std::vector<int64_t> lengths = {5, 1, 0, 66, 2, 14};
  for (const auto dtype : {at::kLong, at::kInt}) {
    const at::Tensor cu_seqlens = offsets(lengths, dtype);
    const at::Tensor ids = random_tokens(config(), 1, 88);
    const at::Tensor packed = model->forward(ids, cu_seqlens);
    int64_t start = 0;
    for (const int64_t length : lengths) {
      const at::Tensor alone = model->forward(ids.narrow(1, start, length));
      EXPECT_LT(relative_error(packed.narrow(1, start, length), alone), kTolerance) << start;
      start += length;
    }
  }
}

// Packed prompts, then packed continuations of other lengths, then one token each as a batch.
TEST_P(CacheOfEveryVariant, PackedPromptsContinue) {
  LanguageModel model = random_model(config());
  const at::Tensor a = random_tokens(config(), 1, 20, 3), b = random_tokens(config(), 1, 20, 4);
  Cache cache;
  const auto piece = [](const at::Tensor& ids, int64_t start, int64_t end) {
    return ids.narrow(1, start, end - start);
  };
  model->forward(at::cat({piece(a, 0, 3), piece(b, 0, 12)}, 1), offsets({3, 9 + 3}), &cache);
  EXPECT_EQ(cache.batch_size(), 2);
  const at::Tensor second =
      model->forward(at::cat({piece(a, 3, 19), piece(b, 12, 13)}, 1), offsets({16, 1}), &cache);
  const at::Tensor last =
      model->forward(at::cat({piece(a, 19, 20), piece(b, 13, 14)}, 0), {}, &cache);
  const at::Tensor whole_a = model->forward(a), whole_b = model->forward(piece(b, 0, 14));
  EXPECT_LT(relative_error(second.narrow(1, 0, 16), piece(whole_a, 3, 19)), kTolerance);
  EXPECT_LT(relative_error(second.narrow(1, 16, 1), piece(whole_b, 12, 13)), kTolerance);
  EXPECT_LT(relative_error(last[0], whole_a[0].narrow(0, 19, 1)), kTolerance);
  EXPECT_LT(relative_error(last[1], whole_b[0].narrow(0, 13, 1)), kTolerance);
}

// Sequences of unequal lengths of which the longest is dropped and another branches.
TEST_P(CacheOfEveryVariant, SelectedRowsOfUnequalLengthsContinue) {
  LanguageModel model = random_model(config());
  const at::Tensor prompts = random_tokens(config(), 1, 3 + 12 + 8);
  Cache cache;
  model->forward(prompts, offsets({3, 12, 8}), &cache);
  for (const bool stepped : {false, true}) {
    Cache branch = cache.select(at::tensor({2, 0, 2}, at::kLong));
    const at::Tensor next = random_tokens(config(), 3, 9, 31);
    const std::vector<int64_t> pieces =
        stepped ? std::vector<int64_t>(9, 1) : std::vector<int64_t>();
    const at::Tensor got = forward_in_pieces(model, next, pieces, branch);
    const std::vector<at::Tensor> parents = {prompts.narrow(1, 15, 8), prompts.narrow(1, 0, 3),
                                             prompts.narrow(1, 15, 8)};
    for (int64_t row = 0; row < 3; ++row) {
      const at::Tensor whole = model->forward(at::cat({parents[row], next.narrow(0, row, 1)}, 1));
      EXPECT_LT(relative_error(got[row], whole[0].narrow(0, parents[row].size(1), 9)), kTolerance)
          << row;
    }
  }
}

TEST_P(CacheOfEveryVariant, NothingLeaksBetweenDocuments) {
  LanguageModel model = random_model(config());
  const std::vector<int64_t> lengths = {9, 2, 40, 13};
  const at::Tensor cu_seqlens = offsets(lengths);
  const at::Tensor ids = random_tokens(config(), 1, 64);
  const at::Tensor before = model->forward(ids, cu_seqlens);
  int64_t start = 0;
  for (const int64_t length : lengths) {
    at::Tensor changed = ids.clone();
    at::Tensor document = changed.narrow(1, start, length);
    document.copy_(document.add(1).remainder(config().vocab_size));
    const at::Tensor after = model->forward(changed, cu_seqlens);
    const at::Tensor same = after.eq(before).all(-1).squeeze(0);
    EXPECT_TRUE(same.narrow(0, 0, start).all().item<bool>()) << start;
    EXPECT_TRUE(same.narrow(0, start + length, 64 - start - length).all().item<bool>()) << start;
    EXPECT_FALSE(same.narrow(0, start, length).any().item<bool>()) << start;
    start += length;
  }
}

// The other direction: no position sees a later one.
TEST_P(CacheOfEveryVariant, Causal) {
  LanguageModel model = random_model(config());
  const at::Tensor ids = random_tokens(config(), 1, 70);
  at::Tensor changed = ids.clone();
  changed[0][50] = (ids[0][50].item<int64_t>() + 1) % config().vocab_size;
  const at::Tensor a = model->forward(ids), b = model->forward(changed);
  EXPECT_LT(relative_error(a.narrow(1, 0, 50), b.narrow(1, 0, 50)), 1e-7);
  EXPECT_GT(relative_error(a.narrow(1, 50, 1), b.narrow(1, 50, 1)), 1e-3);
}

class CacheTest : public ::testing::Test {
 protected:
  ModelConfig config_ = variants().front().config;
  LanguageModel model_ = random_model(config_);
  torch::NoGradGuard no_grad_;
};

TEST_F(CacheTest, GradientsOfPackedDocumentsAreTheSumOfSeparateOnes) {
  const at::AutoGradMode with_grad(true);
  const at::Tensor ids = random_tokens(config_, 1, 40);
  const at::Tensor targets = random_tokens(config_, 1, 40, 11);
  LanguageModel other = copy_model(model_, config_, at::kFloat);
  model_->loss(ids, targets, offsets({7, 33})).nll.backward();
  (other->loss(ids.narrow(1, 0, 7), targets.narrow(1, 0, 7)).nll +
   other->loss(ids.narrow(1, 7, 33), targets.narrow(1, 7, 33)).nll)
      .backward();
  const auto expected = other->named_parameters();
  for (const auto& p : model_->named_parameters()) {
    EXPECT_LT(relative_error(p.value().grad(), expected[p.key()].grad()), 1e-5) << p.key();
  }
}

TEST_F(CacheTest, SelectedRowsContinueOnTheirOwn) {
  const at::Tensor prompt = random_tokens(config_, 2, 9);
  Cache cache;
  model_->forward(prompt, {}, &cache);
  Cache branches = cache.select(at::tensor({1, 1, 0}, at::kLong));
  EXPECT_EQ(branches.batch_size(), 3);
  EXPECT_EQ(branches.tokens_seen, 9);
  const at::Tensor next = random_tokens(config_, 3, 4, 8);
  const at::Tensor got = forward_in_pieces(model_, next, {1, 1, 2}, branches);
  const std::vector<int64_t> parents = {1, 1, 0};
  for (int64_t row = 0; row < 3; ++row) {
    const at::Tensor whole = at::cat({prompt[parents[row]], next[row]}).unsqueeze(0);
    EXPECT_LT(relative_error(got[row], model_->forward(whole)[0].narrow(0, 9, 4)), kTolerance);
  }
}

TEST_F(CacheTest, ACopyIsAnIndependentBranch) {
  const at::Tensor ids = random_tokens(config_, 1, 12);
  Cache cache;
  model_->forward(ids.narrow(1, 0, 10), {}, &cache);
  Cache branch = cache;
  for (int i = 0; i < 5; ++i) model_->forward(random_tokens(config_, 1, 1, 20 + i), {}, &branch);
  const at::Tensor rest = forward_in_pieces(model_, ids.narrow(1, 10, 2), {1, 1}, cache);
  EXPECT_LT(relative_error(rest, model_->forward(ids).narrow(1, 10, 2)), kTolerance);
  EXPECT_EQ(branch.tokens_seen, 15);
}

TEST_F(CacheTest, ARefusedCallLeavesTheCacheAsItWas) {
  const at::Tensor ids = random_tokens(config_, 2, 12);
  Cache cache;
  model_->forward(ids.narrow(1, 0, 11), {}, &cache);
  at::Tensor bad = ids.narrow(1, 11, 1).clone();
  bad[1][0] = 1000;
  EXPECT_THROW(model_->forward(bad, {}, &cache), c10::Error);
  EXPECT_THROW(model_->forward(random_tokens(config_, 3, 1), {}, &cache), c10::Error);
  EXPECT_THROW(model_->forward(random_tokens(config_, 1, 4), offsets({1, 1, 2}), &cache),
               c10::Error);
  EXPECT_EQ(cache.tokens_seen, 11);
  const at::Tensor last = model_->forward(ids.narrow(1, 11, 1), {}, &cache);
  EXPECT_LT(relative_error(last, model_->forward(ids).narrow(1, 11, 1)), kTolerance);
}

TEST_F(CacheTest, RefusesACacheOfAnotherDepth) {
  ModelConfig deeper = config_;
  deeper.num_hidden_layers = 3;
  Cache cache;
  random_model(deeper)->forward(random_tokens(config_, 1, 3), {}, &cache);
  EXPECT_THROW(model_->forward(random_tokens(config_, 1, 3), {}, &cache), c10::Error);
}

TEST_P(CacheOfEveryVariant, StateSizeIsWhatTheConfigSays) {
  Cache cache;
  random_model(config())->forward(random_tokens(config(), 1, 30), {}, &cache);
  int64_t fixed = 0;
  for (const Cache::Layer& layer : cache.layers) {
    for (const at::Tensor* part :
         {&layer.recurrent_state, &layer.conv_q, &layer.conv_k, &layer.conv_v, &layer.conv_xbc}) {
      if (part->defined()) fixed += part->numel();
    }
  }
  EXPECT_EQ(fixed, config().state_elements());
  EXPECT_EQ(config().state_elements_per_token() > 0, cache.layers[1].keys.defined());
}

// Under gradient mode a single token takes the differentiable path and the cache holds no graph.
TEST_F(CacheTest, GradientModeKeepsNoGraphInTheCache) {
  const at::AutoGradMode with_grad(true);
  const at::Tensor ids = random_tokens(config_, 1, 6);
  Cache cache;
  const at::Tensor logits = forward_in_pieces(model_, ids, {1, 1, 3, 1}, cache);
  EXPECT_TRUE(logits.requires_grad());
  EXPECT_FALSE(cache.layers[1].recurrent_state.requires_grad());
  EXPECT_FALSE(cache.layers[1].conv_q.requires_grad());
  EXPECT_LT(relative_error(logits, model_->forward(ids)), kTolerance);
}

TEST_F(CacheTest, Bfloat16DecodingFollowsTheWholeForward) {
  LanguageModel model = random_model(config_, at::kBFloat16);
  const at::Tensor ids = random_tokens(config_, 2, 24);
  Cache cache;
  const at::Tensor steps = forward_in_pieces(model, ids, std::vector<int64_t>(24, 1), cache);
  EXPECT_EQ(cache.layers[0].recurrent_state.scalar_type(), at::kFloat);
  EXPECT_LT(relative_error(steps, model->forward(ids)), 3e-2);
}

}  // namespace
}  // namespace efla
