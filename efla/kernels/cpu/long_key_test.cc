// Keys whose |k|^2 overflows or nearly so, up to the largest finite numbers, against the reference:
// its double holds the square of every float. (Beyond double's own range it has the kernels'
// formulas, which efla/flow/long_key_test.cc and reference_test.cc hold.)
#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <utility>
#include <vector>

#include "efla/kernels/cpu/chunk_test_util.h"
#include "efla/kernels/cpu/kernel_test.h"

namespace efla::testing {
namespace {

struct LongToken {
  int64_t token;
  double length;   // |k|; infinite: every element the largest finite number
  double step;     // beta |k|^2; 0: beta as it was
  double written;  // |v| / |k|
};

// In one chunk and over its border, next to each other, first and last; steps around one where beta
// can hold them.
std::vector<LongToken> long_tokens(DType dtype) {
  if (dtype == DType::kFloat64)
    return {{0, 1e80, 0, 1},   {4, 1e130, 0.5, 1},   {5, 1e152, 2, 1},
            {6, 1e158, 0, 1},  {11, INFINITY, 0, 0}, {31, 1e200, 0, 1},
            {32, 1e155, 0, 1}, {40, 1e308, 0, 0},    {69, 1e170, 0, 1}};
  return {{0, 1e10, 0, 1},  {4, 1e12, 0.5, 1},    {5, 1e18, 2, 1},
          {6, 1e19, 0, 1},  {11, INFINITY, 0, 0}, {31, 1e25, 0, 1},
          {32, 1e20, 0, 1}, {40, 1e38, 0, 0},     {69, 1.5e19, 0, 1}};
}

void lengthen(KernelInputs& in, const KernelCase& c, DType dtype, bool l2norm) {
  ReferenceProblem& p = in.problem;
  p.qk_l2norm = l2norm;
  const double most = dtype == DType::kFloat64    ? DBL_MAX
                      : dtype == DType::kBFloat16 ? 0x1.FEp127  // bfloat16's largest
                                                  : FLT_MAX;
  const auto scale = [&](std::vector<double>& x, int64_t dim, int64_t t, double length) {
    double square = 0;
    for (int64_t i = t * dim; i < (t + 1) * dim; ++i) square += x[i] * x[i];
    for (int64_t i = t * dim; i < (t + 1) * dim; ++i) {
      const double value = x[i] * (length / std::sqrt(square));
      x[i] = std::abs(value) <= most ? rounded(value, dtype) : std::copysign(most, x[i]);
    }
  };
  for (const LongToken& token : long_tokens(dtype)) {
    scale(p.k, c.key_dim, token.token, token.length);
    if (l2norm) {
      scale(p.q, c.key_dim, token.token, token.length);
      continue;
    }
    for (int64_t h = 0; h < c.value_heads; ++h) {
      const int64_t at = token.token * c.value_heads + h;
      if (token.written > 0) scale(p.v, c.value_dim, at, token.length * token.written);
      if (token.step > 0)
        p.beta[at] = rounded(token.step / token.length / token.length, arithmetic_type(dtype));
    }
  }
}

// Row by row, since a gradient of a key is as small as the key is long: within `bound` of the row
// and of `size(row)`, its natural size, beside what the type cannot hold.
template <typename Size>
void expect_rows(const Tensor& actual, const std::vector<double>& expected, int64_t dim,
                 double bound, double smallest, const Size& size, const char* what) {
  const std::vector<double> values = actual.get();
  ASSERT_EQ(values.size(), expected.size());
  for (size_t row = 0; row < values.size() / dim; ++row) {
    double error = 0, norm = 0;
    for (size_t i = row * dim; i < (row + 1) * dim; ++i) {
      ASSERT_TRUE(std::isfinite(values[i])) << what << " of row " << row;
      error = std::hypot(error, values[i] - expected[i]);
      norm = std::hypot(norm, expected[i]);
    }
    ASSERT_LE(error, bound * (norm + size(row)) + smallest * std::sqrt(dim))
        << what << " of row " << row;
  }
}

void expect_as_the_reference(const KernelCase& c, DType dtype, bool l2norm) {
  SCOPED_TRACE(::testing::Message() << rule_name(c.rule) << " decay " << c.decay << " dtype "
                                    << static_cast<int>(dtype) << " l2norm " << l2norm);
  KernelInputs in = make_inputs(c, dtype);
  lengthen(in, c, dtype, l2norm);
  const ReferenceProblem& p = in.problem;
  const ReferenceResult forward = reference_forward(p);
  const ReferenceGradients gradients = reference_backward(p, in.grad_o, in.grad_final_state);
  const double output = dtype == DType::kFloat64 ? 1e-12 : dtype == DType::kBFloat16 ? 3e-3 : 3e-6;
  const double gradient = dtype == DType::kFloat64    ? 1e-11
                          : dtype == DType::kBFloat16 ? 6e-3
                                                      : 2e-5;
  const double smallest = dtype == DType::kFloat64    ? 1e-323
                          : dtype == DType::kBFloat16 ? 0x1p-134
                                                      : 0x1p-149;
  const auto inverse_length = [&](const std::vector<double>& x) {
    return [&x, dim = c.key_dim](size_t row) {
      double length = 0;
      for (size_t i = row * dim; i < (row + 1) * dim; ++i) length = std::hypot(length, x[i]);
      return std::min(1.0, 1 / length);
    };
  };
  const auto one = [](size_t) { return 1.0; };
  cpu::for_each_target([&] {
    KernelRun run(in, dtype);
    for (const Form form : {Form::kRecurrent, Form::kChunk}) {
      run.forward(form, serial(1));
      expect_rows(run.o, forward.o, c.value_dim, output, smallest, one, "o");
      expect_rows(run.final_state, forward.final_state, c.key_dim * c.value_dim, output, smallest,
                  one, "state");
    }
    for (const int threads : {1, 5}) {  // 5: parts that a second pass adds up
      run.backward(serial(threads));
      expect_rows(
          run.grad_q, gradients.q, c.key_dim, gradient, smallest,
          [&](size_t row) { return l2norm ? inverse_length(p.q)(row) : 1.0; }, "dq");
      expect_rows(run.grad_k, gradients.k, c.key_dim, gradient, smallest, inverse_length(p.k),
                  "dk");
      expect_rows(run.grad_v, gradients.v, c.value_dim, gradient, smallest, one, "dv");
      expect_rows(run.grad_beta, gradients.beta, 1, gradient, smallest, one, "dbeta");
      if (c.decay)
        expect_rows(run.grad_log_decay, gradients.log_decay, 1, gradient, smallest, one,
                    "dlog_decay");
      expect_rows(run.grad_initial_state, gradients.initial_state, c.key_dim * c.value_dim,
                  gradient, smallest, one, "dstate");
    }
  });
}

TEST(LongKeys, MatchTheReference) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64})
    for (const auto& [rule, decay] :
         {std::pair{Rule::kExact, false}, {Rule::kExact, true}, {Rule::kExactLog, true}})
      for (const int64_t value_heads : {1, 2})
        expect_as_the_reference({.name = "long",
                                 .key_dim = 33,
                                 .rule = rule,
                                 .decay = decay,
                                 .value_heads = value_heads},
                                dtype, false);
}

TEST(LongKeys, AreUnitKeysWithL2Norm) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64})
    for (const Rule rule : {Rule::kLinear, Rule::kEuler, Rule::kRk4, Rule::kExact})
      expect_as_the_reference({.name = "long", .rule = rule}, dtype, true);
}

// The other rules have no use for |k|^2 (rk2, rk4: their coefficients overflow, and so do they):
// what of their outputs is in range is as in the reference.
TEST(LongKeys, LinearAttentionTakesThemAsTheyAre) {
  KernelCase c = {.name = "long", .rule = Rule::kLinear};
  KernelInputs in = make_inputs(c, DType::kFloat32);
  for (int64_t i = 5 * c.key_dim; i < 6 * c.key_dim; ++i)
    in.problem.k[i] = rounded(1e25 * in.problem.k[i], DType::kFloat32);
  const ReferenceResult forward = reference_forward(in.problem);
  KernelRun run(in, DType::kFloat32);
  run.forward(Form::kChunk, serial(1));
  EXPECT_LE(relative_error(run.o.get(), forward.o), 1e-5);
}

}  // namespace
}  // namespace efla::testing
