// Blocks of the mask, windows, padding and grouped heads against one explicit softmax; rotations.
#include "efla/nn/softmax_attention.h"

#include <gtest/gtest.h>

#include <complex>

#include "efla/nn/test_mixer_references.h"
#include "efla/nn/test_support.h"

namespace efla {
namespace {

using namespace testing_support;

struct Streams {
  at::Tensor q, k, v;
};

Streams random_streams(int64_t batch, int64_t heads, int64_t kv_heads, int64_t queries,
                       int64_t keys) {
  torch::manual_seed(3);
  const auto options = at::TensorOptions().dtype(at::kDouble);
  return {at::randn({batch, heads, queries, 8}, options),
          at::randn({batch, kv_heads, keys, 8}, options),
          at::randn({batch, kv_heads, keys, 8}, options)};
}

TEST(CausalAttention, EveryShapeAndWindow) {
  // The longer ones cross the blocks of the mask.
  const std::vector<std::pair<int64_t, int64_t>> shapes = {{1, 1}, {1, 9},     {9, 9},
                                                           {4, 9}, {600, 600}, {513, 1030}};
  for (const auto& [queries, keys] : shapes) {
    for (const int64_t window : {0, 1, 3, 64, 599, 5000}) {
      for (const int64_t kv_heads : {4, 2, 1}) {
        const Streams s = random_streams(1, 4, kv_heads, queries, keys);
        const at::Tensor expected =
            reference_softmax(s.q, s.k, s.v, reference_visible(queries, keys, window));
        EXPECT_LT(relative_error(causal_attention(s.q, s.k, s.v, window), expected), 1e-12)
            << queries << " of " << keys << ", window " << window << ", heads " << kv_heads;
      }
    }
  }
}

TEST(CausalAttention, PaddedKeysAreNotSeen) {
  const std::vector<int64_t> starts = {0, 5, 2};
  for (const int64_t window : {0, 3}) {
    for (const int64_t queries : {1, 4}) {
      Streams s = random_streams(3, 2, 2, queries, 9);
      const at::Tensor o = causal_attention(s.q, s.k, s.v, window, starts);
      for (int64_t row = 0; row < 3; ++row) {
        const auto own = [&](const at::Tensor& t) {
          return t.narrow(0, row, 1).narrow(2, starts[row], 9 - starts[row]);
        };
        const at::Tensor alone =
            causal_attention(s.q.narrow(0, row, 1), own(s.k), own(s.v), window);
        EXPECT_LT(relative_error(o.narrow(0, row, 1), alone), 1e-12) << row;
      }
    }
  }
}

TEST(CausalAttention, NoQueriesGiveNothing) {
  const Streams s = random_streams(2, 2, 2, 0, 5);
  EXPECT_EQ(causal_attention(s.q, s.k, s.v).sizes(), s.q.sizes());
}

TEST(Rotation, IsAComplexProductAndKeepsOnlyTheDistance) {
  torch::manual_seed(5);
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const at::Tensor x = at::randn({1, 1, 1, 6}, options), y = at::randn({1, 1, 1, 6}, options);
  const auto turned = [](const at::Tensor& t, int64_t position) {
    return rotate(t, RotaryTable(at::tensor({position}, at::kLong), 6, 100.0, at::kDouble));
  };
  const at::Tensor z = turned(x, 7);
  for (int64_t i = 0; i < 3; ++i) {
    const std::complex<double> a(x[0][0][0][i].item<double>(), x[0][0][0][i + 3].item<double>());
    const auto expected = a * std::polar(1.0, 7 * std::pow(100.0, -2.0 * i / 6));
    EXPECT_NEAR(z[0][0][0][i].item<double>(), expected.real(), 1e-12);
    EXPECT_NEAR(z[0][0][0][i + 3].item<double>(), expected.imag(), 1e-12);
  }
  const double near = (turned(x, 3) * turned(y, 8)).sum().item<double>();
  const double far = (turned(x, 100003) * turned(y, 100008)).sum().item<double>();
  EXPECT_NEAR(near, far, 1e-8);
}

TEST(Rotation, FarPositionsAreAsExactInFloat32) {
  const at::Tensor positions = at::tensor({int64_t{0}, int64_t{12345}, int64_t{10'000'019}});
  const RotaryTable narrow(positions, 64, 1e4, at::kFloat), wide(positions, 64, 1e4, at::kDouble);
  EXPECT_LT((narrow.cos - wide.cos).abs().max().item<double>(), 1e-6);
  EXPECT_LT((narrow.sin - wide.sin).abs().max().item<double>(), 1e-6);
}

TEST(Rotation, RowsMayStandAtPositionsOfTheirOwn) {
  torch::manual_seed(5);
  const at::Tensor x = at::randn({2, 3, 2, 4});
  const at::Tensor positions = at::tensor({4, 5, 9, 10}, at::kLong).view({2, 2});
  const at::Tensor together = rotate(x, RotaryTable(positions, 4, 1e4, at::kFloat));
  for (int64_t row = 0; row < 2; ++row) {
    const RotaryTable table(positions[row], 4, 1e4, at::kFloat);
    EXPECT_TRUE(together[row].equal(rotate(x.narrow(0, row, 1), table)[0]));
  }
}

}  // namespace
}  // namespace efla
