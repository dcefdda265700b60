// The short convolution against double arithmetic: every width, storage type and instruction set,
// packed sequences, states and their gradients. The reference backward is the transpose of the
// reference forward, itself checked against central differences.
#include <algorithm>
#include <vector>

#include "efla/kernels/cpu/kernel_test.h"
#include "efla/kernels/cpu/layer_ops.h"

namespace efla::cpu {
namespace {

struct ConvCase {
  int64_t batch = 1, tokens = 10, channels = 20, width = 4;
  DType dtype = DType::kFloat32;
  bool silu = true, initial = true, bias = false;
  std::vector<int64_t> cu_seqlens = {};
  int64_t sequences() const {
    return cu_seqlens.empty() ? batch : static_cast<int64_t>(cu_seqlens.size()) - 1;
  }
};

double silu(double x) { return x / (1 + std::exp(-x)); }
double silu_slope(double x) {
  const double s = 1 / (1 + std::exp(-x));
  return s * (1 + x * (1 - s));
}

class ConvData {
 public:
  explicit ConvData(const ConvCase& c)
      : c_(c),
        x(Array::random(c.dtype, rows() * token(), 1)),
        weight(Array::random(c.dtype, c.channels * c.width, 2)),
        bias(Array::random(c.dtype, c.channels, 6)),
        initial(Array::random(c.dtype, states(), 3)),
        grad_y(Array::random(c.dtype, rows() * token(), 4)),
        grad_final(Array::random(c.dtype, states(), 5)),
        y(c.dtype, rows() * token()),
        final_state(c.dtype, states()),
        grad_x(c.dtype, rows() * token()),
        grad_weight(arithmetic_dtype(c.dtype), c.channels * c.width),
        grad_bias(arithmetic_dtype(c.dtype), c.channels),
        grad_initial(c.dtype, states()) {}

  int64_t rows() const { return c_.batch * c_.tokens; }
  int64_t token() const { return c_.channels + 3; }  // a gap after each token
  int64_t states() const { return c_.sequences() * c_.channels * c_.width; }

  ShortConvParams params() {
    ShortConvParams p;
    p.batch = c_.batch;
    p.tokens = c_.tokens;
    p.channels = c_.channels;
    p.width = c_.width;
    p.sequences = c_.sequences();
    p.dtype = c_.dtype;
    p.silu = c_.silu;
    p.x = {x.data(), c_.tokens * token(), token(), 0};
    p.weight = weight.data();
    p.bias = c_.bias ? bias.data() : nullptr;
    p.initial_state = c_.initial ? initial.data() : nullptr;
    p.cu_seqlens = c_.cu_seqlens.empty() ? nullptr : c_.cu_seqlens.data();
    p.y = {y.data(), c_.tokens * token(), token(), 0};
    p.final_state = final_state.data();
    return p;
  }
  ShortConvBackwardParams backward_params() {
    ShortConvBackwardParams p;
    p.forward = params();
    p.grad_y = {grad_y.data(), c_.tokens * token(), token(), 0};
    p.grad_x = {grad_x.data(), c_.tokens * token(), token(), 0};
    p.grad_weight = grad_weight.data();
    p.grad_bias = c_.bias ? grad_bias.data() : nullptr;
    p.grad_final_state = grad_final.data();
    p.grad_initial_state = grad_initial.data();
    return p;
  }
  void run(const Executor& executor) {
    short_conv_forward(params(), executor);
    short_conv_backward(backward_params(), executor);
  }
  // Without the gaps: [rows, channels].
  std::vector<double> dense(const Array& a) const {
    std::vector<double> out;
    for (int64_t r = 0; r < rows(); ++r)
      for (int64_t d = 0; d < c_.channels; ++d) out.push_back(a.get(r * token() + d));
    return out;
  }

  ConvCase c_;
  Array x, weight, bias, initial, grad_y, grad_final;
  Array y, final_state, grad_x, grad_weight, grad_bias, grad_initial;
};

struct Reference {
  std::vector<double> y, final_state, grad_x, grad_weight, grad_bias, grad_initial;
};

// All of it, channel by channel: the inputs of one channel of one sequence are a vector `in` of its
// last W inputs before the start and its own L.
Reference reference(const ConvData& data) {
  const ConvCase& c = data.c_;
  const int64_t W = c.width, D = c.channels;
  Reference r;
  r.y.assign(data.rows() * D, 0.0);
  r.grad_x = r.y;
  r.grad_weight.assign(D * W, 0.0);
  r.grad_bias.assign(D, 0.0);
  r.final_state.assign(data.states(), 0.0);
  r.grad_initial = r.final_state;
  for (int64_t n = 0; n < c.sequences(); ++n) {
    const int64_t first = c.cu_seqlens.empty() ? n * c.tokens : c.cu_seqlens[n];
    const int64_t length = c.cu_seqlens.empty() ? c.tokens : c.cu_seqlens[n + 1] - c.cu_seqlens[n];
    for (int64_t d = 0; d < D; ++d) {
      const int64_t state = (n * D + d) * W;
      std::vector<double> in(W + length), grad_in(W + length, 0.0);
      for (int64_t w = 0; w < W; ++w) in[w] = c.initial ? data.initial.get(state + w) : 0.0;
      for (int64_t t = 0; t < length; ++t) in[W + t] = data.x.get((first + t) * data.token() + d);
      for (int64_t t = 0; t < length; ++t) {
        double z = c.bias ? data.bias.get(d) : 0.0;
        for (int64_t w = 0; w < W; ++w) z += data.weight.get(d * W + w) * in[t + 1 + w];
        r.y[(first + t) * D + d] = c.silu ? silu(z) : z;
        const double dz =
            data.grad_y.get((first + t) * data.token() + d) * (c.silu ? silu_slope(z) : 1.0);
        r.grad_bias[d] += dz;
        for (int64_t w = 0; w < W; ++w) {
          grad_in[t + 1 + w] += dz * data.weight.get(d * W + w);
          r.grad_weight[d * W + w] += dz * in[t + 1 + w];
        }
      }
      for (int64_t w = 0; w < W; ++w) {
        r.final_state[state + w] = in[length + w];
        grad_in[length + w] += data.grad_final.get(state + w);
      }
      for (int64_t w = 0; w < W; ++w) r.grad_initial[state + w] = grad_in[w];
      for (int64_t t = 0; t < length; ++t) r.grad_x[(first + t) * D + d] = grad_in[W + t];
    }
  }
  return r;
}

void expect_matches_reference(const ConvCase& c) {
  SCOPED_TRACE(testing::Message() << dtype_name(c.dtype) << " T " << c.tokens << " D " << c.channels
                                  << " W " << c.width << " silu " << c.silu << " initial "
                                  << c.initial << " bias " << c.bias);
  for_each_target([&] {
    ConvData data(c);
    data.run(threaded_executor(3));
    const Reference expected = reference(data);
    const double tol = tolerance(c.dtype);
    expect_close(data.dense(data.y), expected.y, tol, "y");
    EXPECT_EQ(data.final_state.values(), expected.final_state);
    expect_close(data.dense(data.grad_x), expected.grad_x, tol, "grad_x");
    expect_close(data.grad_weight.values(), expected.grad_weight,
                 tolerance(arithmetic_dtype(c.dtype)), "grad_weight");
    if (c.bias)
      expect_close(data.grad_bias.values(), expected.grad_bias,
                   tolerance(arithmetic_dtype(c.dtype)), "grad_bias");
    if (c.initial)
      expect_close(data.grad_initial.values(), expected.grad_initial, tol, "grad_initial");
  });
}

TEST(ShortConv, EveryStorageTypeWidthAndActivation) {
  for (const DType dtype : kStorageTypes)
    for (const int64_t width : {1, 2, 3, 4, 7})
      for (const bool silu : {false, true})
        for (const bool initial : {false, true})
          for (const bool bias : {false, true}) {
            ConvCase c;
            c.batch = 2;
            c.dtype = dtype;
            c.width = width;
            c.silu = silu;
            c.initial = initial;
            c.bias = bias;
            expect_matches_reference(c);
          }
}

TEST(ShortConv, OddSizesAndSequencesShorterThanTheFilter) {
  for (const int64_t tokens : {0, 1, 2, 3, 4, 31, 32, 33, 70, 200})
    for (const int64_t channels : {1, 16, 131}) {
      ConvCase c;
      c.tokens = tokens;
      c.channels = channels;
      c.bias = true;
      expect_matches_reference(c);
    }
}

TEST(ShortConv, PackedSequencesWithEmptyOnesAndPadding) {
  for (const DType dtype : kStorageTypes)
    for (const bool initial : {false, true}) {
      ConvCase c;
      c.dtype = dtype;
      c.initial = c.bias = initial;
      c.tokens = 180;
      c.cu_seqlens = {5, 5, 6, 8, 8, 80, 150, 150};
      expect_matches_reference(c);
    }
}

TEST(ShortConv, ReferenceGradientIsTheDifferenceQuotient) {
  ConvCase c;
  c.dtype = DType::kFloat64;
  c.tokens = 6;
  c.channels = 3;
  c.bias = true;
  ConvData data(c);
  const Reference base = reference(data);
  const auto loss = [&] {
    const Reference r = reference(data);
    double sum = 0;
    for (int64_t i = 0; i < data.rows(); ++i)
      for (int64_t d = 0; d < c.channels; ++d)
        sum += r.y[i * c.channels + d] * data.grad_y.get(i * data.token() + d);
    for (size_t i = 0; i < r.final_state.size(); ++i)
      sum += r.final_state[i] * data.grad_final.get(i);
    return sum;
  };
  const auto expect_slope = [&](Array& a, int64_t i, double expected) {
    const double kept = a.get(i), h = 1e-5;
    a.set(i, kept + h);
    const double up = loss();
    a.set(i, kept - h);
    EXPECT_NEAR((up - loss()) / (2 * h), expected, 1e-8);
    a.set(i, kept);
  };
  for (int64_t i = 0; i < data.weight.size(); ++i)
    expect_slope(data.weight, i, base.grad_weight[i]);
  for (int64_t d = 0; d < c.channels; ++d) expect_slope(data.bias, d, base.grad_bias[d]);
  for (int64_t i = 0; i < data.states(); ++i) expect_slope(data.initial, i, base.grad_initial[i]);
  for (int64_t i = 0; i < data.rows(); ++i)
    for (int64_t d = 0; d < c.channels; ++d)
      expect_slope(data.x, i * data.token() + d, base.grad_x[i * c.channels + d]);
}

TEST(ShortConv, SplitSequenceEqualsWhole) {
  ConvCase c;
  c.tokens = 90;
  ConvData whole(c);
  short_conv_forward(whole.params(), {});
  for (const int64_t cut : {1, 3, 50}) {
    ConvData parts(c);
    ShortConvParams p = parts.params();
    p.tokens = cut;
    Array between(c.dtype, parts.states());
    p.final_state = between.data();
    short_conv_forward(p, {});
    p.x.data = static_cast<const float*>(p.x.data) + cut * p.x.token;
    p.y.data = static_cast<float*>(p.y.data) + cut * p.y.token;
    p.tokens = c.tokens - cut;
    p.initial_state = between.data();
    p.final_state = parts.final_state.data();
    short_conv_forward(p, {});
    EXPECT_EQ(parts.dense(parts.y), whole.dense(whole.y)) << "cut at " << cut;
    EXPECT_TRUE(parts.final_state.same_bits(whole.final_state));
  }
}

TEST(ShortConv, SameBitsForAnyThreads) {
  ConvCase c;
  c.tokens = 700;
  c.channels = 300;
  c.bias = true;
  ConvData one(c), many(c);
  one.run({});
  many.run(threaded_executor(6));
  EXPECT_EQ(one.dense(one.y), many.dense(many.y));
  EXPECT_EQ(one.dense(one.grad_x), many.dense(many.grad_x));
  EXPECT_TRUE(one.grad_weight.same_bits(many.grad_weight));
  EXPECT_TRUE(one.grad_bias.same_bits(many.grad_bias));
  EXPECT_TRUE(one.grad_initial.same_bits(many.grad_initial));
}

TEST(ShortConv, WritesNothingBetweenTokens) {
  ConvCase c;
  ConvData data(c);
  data.run({});
  for (const Array* a : {&data.y, &data.grad_x}) {
    int64_t untouched = 0;
    for (double v : a->values()) untouched += std::isnan(v);
    EXPECT_EQ(untouched, 3 * data.rows());
  }
}

}  // namespace
}  // namespace efla::cpu
