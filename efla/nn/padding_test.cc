// Padded batches: every row gives what its valid tokens give alone, in every family.
#include "efla/nn/padding.h"

#include <gtest/gtest.h>

#include "efla/nn/test_support.h"

namespace efla {
namespace {

using namespace testing_support;

constexpr double kTolerance = 1e-5;
const std::vector<int64_t> kLengths = {7, 23, 1, 0, 16};
constexpr int64_t kWidth = 23;

// A batch of rows of kLengths tokens, padded with tokens that no vocabulary has.
struct Padded {
  at::Tensor ids, mask;
  std::vector<at::Tensor> rows;  // [1, length] each
};

Padded padded(const ModelConfig& config, bool left) {
  const int64_t batch = static_cast<int64_t>(kLengths.size());
  Padded out{at::full({batch, kWidth}, -1, at::kLong), at::zeros({batch, kWidth}, at::kLong), {}};
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = kLengths[b], start = left ? kWidth - length : 0;
    out.rows.push_back(random_tokens(config, 1, length, 100 + b));
    out.ids[b].narrow(0, start, length).copy_(out.rows.back()[0]);
    out.mask[b].narrow(0, start, length).fill_(1);
  }
  return out;
}

class PaddingOfEveryVariant : public ::testing::TestWithParam<Variant> {
 protected:
  const ModelConfig& config() const { return GetParam().config; }
  torch::NoGradGuard no_grad_;
};
INSTANTIATE_TEST_SUITE_P(Nn, PaddingOfEveryVariant, ::testing::ValuesIn(variants()), variant_name);

TEST_P(PaddingOfEveryVariant, LeftAndRightPaddedRowsEqualTheRowsAlone) {
  LanguageModel model = random_model(config());
  for (const bool left : {false, true}) {
    const Padded batch = padded(config(), left);
    const at::Tensor logits = model->forward_padded(batch.ids, batch.mask);
    ASSERT_EQ(logits.sizes(), at::IntArrayRef({5, kWidth, config().vocab_size}));
    for (size_t b = 0; b < kLengths.size(); ++b) {
      const int64_t length = kLengths[b], start = left ? kWidth - length : 0;
      const at::Tensor row = logits[static_cast<int64_t>(b)];
      EXPECT_LT(relative_error(row.narrow(0, start, length), model->forward(batch.rows[b])[0]),
                kTolerance)
          << "row " << b << (left ? " left" : " right");
      const at::Tensor padding =
          left ? row.narrow(0, 0, start) : row.narrow(0, length, kWidth - length);
      EXPECT_TRUE(padding.eq(0).all().item<bool>()) << "row " << b;
    }
  }
}

// A padded prompt, a padded continuation, then one token each as decoding does.
TEST_P(PaddingOfEveryVariant, TheCacheAdvancesByTheValidTokens) {
  LanguageModel model = random_model(config());
  const Padded prompt = padded(config(), /*left=*/true);
  const Padded more = padded(config(), /*left=*/false);
  const at::Tensor last = random_tokens(config(), 5, 1, 55);
  Cache cache;
  model->forward_padded(prompt.ids, prompt.mask, &cache);
  const at::Tensor continued =
      model->forward_padded(more.ids.flip(0), more.mask.flip(0).to(at::kBool), &cache);
  const at::Tensor step = model->forward(last, {}, &cache);
  EXPECT_EQ(cache.batch_size(), 5);
  for (int64_t b = 0; b < 5; ++b) {
    const int64_t first = kLengths[b], second = kLengths[4 - b];
    const at::Tensor whole =
        model->forward(at::cat({prompt.rows[b], more.rows[4 - b], last.narrow(0, b, 1)}, 1))[0];
    EXPECT_LT(relative_error(continued[b].narrow(0, 0, second), whole.narrow(0, first, second)),
              kTolerance)
        << b;
    EXPECT_LT(relative_error(step[b][0], whole[first + second]), kTolerance) << b;
  }
}

class PaddingTest : public ::testing::Test {
 protected:
  ModelConfig config_ = variant("gated_efla_rate").config;
  LanguageModel model_ = random_model(config_);
};

TEST_F(PaddingTest, GradientsComeFromTheValidTokensAlone) {
  const Padded batch = padded(config_, /*left=*/true);
  model_->forward_padded(batch.ids, batch.mask).square().sum().backward();
  LanguageModel other = copy_model(model_, config_, at::kFloat);
  for (const at::Tensor& row : batch.rows) other->forward(row).square().sum().backward();
  const auto expected = other->named_parameters();
  for (const auto& p : model_->named_parameters()) {
    EXPECT_LT(relative_error(p.value().grad(), expected[p.key()].grad()), kTolerance) << p.key();
  }
}

TEST_F(PaddingTest, HolesAreSkippedAndAFullMaskChangesNothing) {
  const torch::NoGradGuard no_grad;
  at::Tensor ids = random_tokens(config_, 1, 9);
  const at::Tensor mask = at::tensor({0, 1, 1, 0, 0, 1, 1, 1, 0}, at::kInt).unsqueeze(0);
  const at::Tensor positions = mask[0].nonzero().squeeze(1);
  const at::Tensor got = model_->forward_padded(ids, mask)[0].index_select(0, positions);
  EXPECT_LT(relative_error(got, model_->forward(ids.index_select(1, positions))[0]), kTolerance);
  EXPECT_TRUE(model_->forward_padded(ids, at::ones_like(ids)).equal(model_->forward(ids)));
}

TEST_F(PaddingTest, MasksThatDoNotFitAreRefused) {
  const at::Tensor ids = random_tokens(config_, 2, 9);
  Cache cache;
  EXPECT_THROW(model_->forward_padded(ids, at::ones({2, 8}, at::kLong), &cache), c10::Error);
  EXPECT_THROW(model_->forward_padded(ids, at::ones({18}, at::kLong), &cache), c10::Error);
  EXPECT_THROW(model_->forward_padded(ids, at::ones({2, 9}), &cache), c10::Error);
  EXPECT_TRUE(cache.empty());
}

TEST(PaddedRows, PackAndUnpackAreInverse) {
  const at::Tensor mask = at::tensor({1, 0, 1, 0, 0, 0, 0, 1, 1}, at::kLong).view({3, 3});
  const PaddedRows rows(mask, {3, 3});
  EXPECT_TRUE(rows.cu_seqlens.equal(at::tensor({0, 2, 2, 4}, at::kLong)));
  EXPECT_FALSE(rows.all_valid());
  const at::Tensor x = at::arange(18, at::kFloat).view({3, 3, 2});
  const at::Tensor packed = rows.pack(x);
  EXPECT_EQ(packed.sizes(), at::IntArrayRef({1, 4, 2}));
  EXPECT_TRUE(packed[0][1].equal(x[0][2]));
  EXPECT_TRUE(rows.unpack(packed).equal(x * mask.unsqueeze(-1)));
}

}  // namespace
}  // namespace efla
