#include "efla/flow/reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "efla/flow/test_support.h"

namespace efla {
namespace {

using namespace efla::testing;  // NOLINT(google-build-using-namespace): test helpers

// S_t = e^g (I - e k k^T) S_{t-1} + w k v^T with explicit K x K matrices, one head, one sequence.
ReferenceResult by_matrices(const ReferenceProblem& p) {
  Matrix state(p.key_dim, p.value_dim, p.initial_state.data());
  ReferenceResult result;
  for (int64_t t = 0; t < p.tokens; ++t) {
    const Matrix k(p.key_dim, 1, &p.k[t * p.key_dim]), q(p.key_dim, 1, &p.q[t * p.key_dim]);
    const Matrix v(p.value_dim, 1, &p.v[t * p.value_dim]);
    const bool decay = !p.log_decay.empty();
    const auto c = step_coefficients<double>(p.rule, p.beta[t], dot(k.data, k.data), decay,
                                             decay ? p.log_decay[t] : 0);
    const Matrix erase = identity(p.key_dim) - c.erase * (k * k.transposed());
    state = std::exp(c.log_gate) * (erase * state) + c.write * (k * v.transposed());
    const Matrix o = p.scale * (state.transposed() * q);
    result.o.insert(result.o.end(), o.data.begin(), o.data.end());
  }
  result.final_state = state.data;
  return result;
}

TEST(ReferenceForward, IsTheRecurrence) {
  for (const Rule rule : kAllRules)
    for (const bool decay : {false, true}) {
      ReferenceProblem p = single_head(rule, 20, 5, 3, 21, decay);
      p.scale = 0.3;
      const auto got = reference_forward(p), expected = by_matrices(p);
      EXPECT_LT(relative_error(got.o, expected.o), 1e-13) << rule_name(rule);
      EXPECT_LT(relative_error(got.final_state, expected.final_state), 1e-13) << rule_name(rule);
    }
}

// Rows [begin, end) of batch row `row`, value head `head`, as a problem of their own.
ReferenceProblem slice(const ReferenceProblem& p, int64_t row, int64_t begin, int64_t end,
                       int64_t head, int64_t sequence) {
  ReferenceProblem s;
  s.tokens = end - begin;
  s.key_dim = p.key_dim;
  s.value_dim = p.value_dim;
  s.rule = p.rule;
  s.scale = p.scale;
  s.qk_l2norm = p.qk_l2norm;
  const int64_t key_head = head / (p.value_heads / p.heads);
  for (int64_t t = begin; t < end; ++t) {
    const int64_t at = row * p.tokens + t;
    const int64_t key = (at * p.heads + key_head) * p.key_dim, scalar = at * p.value_heads + head;
    s.q.insert(s.q.end(), &p.q[key], &p.q[key] + p.key_dim);
    s.k.insert(s.k.end(), &p.k[key], &p.k[key] + p.key_dim);
    const double* v = &p.v[scalar * p.value_dim];
    s.v.insert(s.v.end(), v, v + p.value_dim);
    s.beta.push_back(p.beta[scalar]);
    if (!p.log_decay.empty()) s.log_decay.push_back(p.log_decay[scalar]);
  }
  const int64_t size = p.key_dim * p.value_dim;
  const double* state = &p.initial_state[(sequence * p.value_heads + head) * size];
  s.initial_state.assign(state, state + size);
  return s;
}

// Empty sequences first and in the middle; rows 18 and 19 are padding.
const std::vector<int64_t> kEmptyFirst{0, 0, 6, 6, 7, 18};

ReferenceProblem batched(uint64_t seed, const std::vector<int64_t>& cu_seqlens) {
  const bool packed = !cu_seqlens.empty();
  ReferenceProblem p;
  p.batch = packed ? 1 : 3;
  p.tokens = packed ? 20 : 7;
  p.heads = 2;
  p.value_heads = 4;
  p.key_dim = 5;
  p.value_dim = 3;
  p.scale = 0.6;
  p.cu_seqlens = cu_seqlens;
  std::mt19937_64 random(seed);
  fill(p, random, true);
  return p;
}

// Every (sequence, value head) is what it would be alone: rows, head grouping, packing, empty
// sequences and the rows past the end.
TEST(ReferenceForward, HeadsAndSequencesAreIndependent) {
  const std::vector<int64_t> dense, late_start{2, 6, 7, 18, 18};
  for (const auto& cu_seqlens : {dense, kEmptyFirst, late_start})
    for (const bool l2norm : {false, true}) {
      ReferenceProblem p = batched(22, cu_seqlens);
      const bool packed = !cu_seqlens.empty();
      p.qk_l2norm = l2norm;
      const auto all = reference_forward(p);
      const int64_t size = p.key_dim * p.value_dim;
      for (int64_t n = 0; n < p.sequences(); ++n)
        for (int64_t head = 0; head < p.value_heads; ++head) {
          const int64_t begin = packed ? p.cu_seqlens[n] : 0;
          const int64_t end = packed ? p.cu_seqlens[n + 1] : p.tokens;
          const int64_t row = packed ? 0 : n;
          const auto alone = reference_forward(slice(p, row, begin, end, head, n));
          for (int64_t t = begin; t < end; ++t)
            for (int64_t j = 0; j < p.value_dim; ++j)
              ASSERT_EQ(all.o[((row * p.tokens + t) * p.value_heads + head) * p.value_dim + j],
                        alone.o[(t - begin) * p.value_dim + j]);
          for (int64_t i = 0; i < size; ++i)
            ASSERT_EQ(all.final_state[(n * p.value_heads + head) * size + i], alone.final_state[i]);
        }
    }
}

// qk_l2norm is x * rsqrt(sum x^2 + 1e-6), with keys short enough for the 1e-6 to matter.
TEST(ReferenceForward, L2NormIsTheDocumentedFormula) {
  ReferenceProblem p = single_head(Rule::kExact, 10, 5, 3, 33, true);
  for (double& x : p.k) x *= 1e-3;
  ReferenceProblem normalised = p;
  p.qk_l2norm = true;
  for (auto* x : {&normalised.q, &normalised.k})
    for (int64_t t = 0; t < p.tokens; ++t) {
      double squares = 0;
      for (int64_t i = 0; i < 5; ++i) squares += (*x)[t * 5 + i] * (*x)[t * 5 + i];
      for (int64_t i = 0; i < 5; ++i) (*x)[t * 5 + i] /= std::sqrt(squares + 1e-6);
    }
  const auto got = reference_forward(p), expected = reference_forward(normalised);
  EXPECT_LT(relative_error(got.o, expected.o), 1e-14);
  EXPECT_LT(relative_error(got.final_state, expected.final_state), 1e-14);
}

TEST(ReferenceForward, StateHandOverSplitsASequence) {
  const ReferenceProblem whole = single_head(Rule::kExact, 100, 5, 3, 23, true);
  ReferenceProblem first = slice(whole, 0, 0, 37, 0, 0), second = slice(whole, 0, 37, 100, 0, 0);
  const auto head = reference_forward(first);
  second.initial_state = head.final_state;
  const auto tail = reference_forward(second), all = reference_forward(whole);
  std::vector<double> joined = head.o;
  joined.insert(joined.end(), tail.o.begin(), tail.o.end());
  EXPECT_EQ(joined, all.o);
  EXPECT_EQ(tail.final_state, all.final_state);
}

TEST(ReferenceForward, PaddingMayHoldAnything) {
  ReferenceProblem p = batched(24, kEmptyFirst);
  const auto clean = reference_forward(p);
  std::mt19937_64 random(25);
  const auto grad_o = normal(random, static_cast<int64_t>(p.v.size()));
  const auto clean_grad = reference_backward(p, grad_o);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (int64_t t = 18; t < p.tokens; ++t) {
    for (int64_t i = 0; i < 10; ++i) p.q[t * 10 + i] = p.k[t * 10 + i] = nan;
    for (int64_t i = 0; i < 12; ++i) p.v[t * 12 + i] = nan;
    for (int64_t i = 0; i < 4; ++i) p.beta[t * 4 + i] = p.log_decay[t * 4 + i] = nan;
  }
  const auto dirty = reference_forward(p);
  EXPECT_EQ(clean.o, dirty.o);
  for (size_t i = 18 * 12; i < dirty.o.size(); ++i) EXPECT_EQ(dirty.o[i], 0);
  const auto dirty_grad = reference_backward(p, grad_o);
  EXPECT_EQ(clean_grad.k, dirty_grad.k);
  EXPECT_EQ(clean_grad.beta, dirty_grad.beta);
  p.qk_l2norm = true;
  for (const double x : reference_backward(p, grad_o).k) EXPECT_TRUE(std::isfinite(x));
}

TEST(ReferenceForward, EmptyInputsPassTheStateThrough) {
  ReferenceProblem p = single_head(Rule::kExact, 0, 5, 3, 26);
  EXPECT_EQ(reference_forward(p).final_state, p.initial_state);
  const auto grad = reference_backward(p, {}, p.initial_state);
  EXPECT_EQ(grad.initial_state, p.initial_state);
}

TEST(ReferenceForward, WrongSizesAreNamed) {
  ReferenceProblem p = single_head(Rule::kExact, 4, 5, 3, 27);
  p.v.pop_back();
  try {
    reference_forward(p);
    FAIL() << "a short v was accepted";
  } catch (const std::invalid_argument& e) {
    EXPECT_NE(std::string(e.what()).find("v has 11 elements"), std::string::npos) << e.what();
  }
  p = single_head(Rule::kExact, 4, 5, 3, 27);
  p.cu_seqlens = {0, 5};
  EXPECT_THROW(reference_forward(p), std::invalid_argument);
  p.cu_seqlens = {0, 3, 2};
  EXPECT_THROW(reference_forward(p), std::invalid_argument);
}

// Keys so long or short that the exact rule is at either limit: everything stays finite.
TEST(ReferenceBackward, ExtremeKeysGiveFiniteGradients) {
  for (const double length : {0.0, 1e-200, 1e-8, 1e3, 1e8, 1e140})
    for (const Rule rule : {Rule::kExact, Rule::kExactLog})
      for (const bool decay : {false, true}) {
        ReferenceProblem p = single_head(rule, 6, 4, 3, 28, decay);
        for (double& x : p.k) x *= length;
        std::mt19937_64 random(29);
        const auto grads = reference_backward(p, normal(random, 18), normal(random, 12));
        for (const auto* g :
             {&grads.q, &grads.k, &grads.v, &grads.beta, &grads.log_decay, &grads.initial_state})
          for (const double x : *g) ASSERT_TRUE(std::isfinite(x)) << length << rule_name(rule);
      }
}

// Keys whose |k|^2 is beyond 2^500, or overflows. A power of two c can be moved from k to v and
// beta: (k, v, beta) and (c k, c v, beta / c^2) are the same step, so dk and dv scale by 1 / c,
// dbeta by c^2. With l2_norm neither counts.
TEST(Reference, LongKeysAreTheSameStep) {
  struct Lengths {
    double key, c;
  };
  for (const auto& [key, c] : {Lengths{1, 0x1p400}, Lengths{0x1p100, 0x1p500}})
    for (const bool l2norm : {false, true})
      for (const Rule rule : {Rule::kExact, Rule::kExactLog})
        for (const bool decay : {false, true}) {
          ReferenceProblem p = single_head(rule, 6, 4, 3, 30, decay);
          p.qk_l2norm = l2norm;
          for (double& x : p.k) x *= l2norm ? key * 0x1p100 : key;  // far above 1e-6
          ReferenceProblem longer = p;
          for (double& x : longer.k) x *= c;
          const double unit = l2norm ? 1 : c;
          for (double& x : longer.v) x *= unit;
          for (double& x : longer.beta) x /= unit * unit;
          const auto expected = reference_forward(p), result = reference_forward(longer);
          EXPECT_LT(relative_error(result.o, expected.o), 1e-14);
          EXPECT_LT(relative_error(result.final_state, expected.final_state), 1e-14);
          std::mt19937_64 random(31);
          const auto grad_o = normal(random, 18);
          auto grads = reference_backward(longer, grad_o);
          const auto truth = reference_backward(p, grad_o);
          for (double& x : grads.k) x *= c;
          for (double& x : grads.v) x *= unit;
          for (double& x : grads.beta) x /= unit * unit;
          for (const auto member :
               {&ReferenceGradients::q, &ReferenceGradients::k, &ReferenceGradients::v,
                &ReferenceGradients::beta, &ReferenceGradients::log_decay,
                &ReferenceGradients::initial_state})
            EXPECT_LE(relative_error(grads.*member, truth.*member), 1e-12)
                << rule_name(rule) << " " << c;
        }
}

using GradientCase = std::tuple<Rule, bool, bool, bool>;  // rule, decay, l2norm, packed

class ReferenceGradient : public ::testing::TestWithParam<GradientCase> {
 protected:
  void SetUp() override {
    const auto [rule, decay, l2norm, packed] = GetParam();
    // More than 64 tokens in one sequence, so that recomputed segments are crossed.
    problem_.batch = packed ? 1 : 2;
    problem_.tokens = packed ? 80 : 66;
    problem_.heads = 2;
    problem_.value_heads = 4;
    problem_.key_dim = 3;
    problem_.value_dim = 2;
    problem_.rule = rule;
    problem_.scale = 0.7;
    problem_.qk_l2norm = l2norm;
    if (packed) problem_.cu_seqlens = {1, 4, 4, 77};
    std::mt19937_64 random(31);
    fill(problem_, random, decay);
    grad_o_ = normal(random, static_cast<int64_t>(problem_.v.size()));
    grad_state_ = normal(random, static_cast<int64_t>(problem_.initial_state.size()));
  }

  double loss() const {
    const auto result = reference_forward(problem_);
    return dot(result.o, grad_o_) + dot(result.final_state, grad_state_);
  }

  // Central differences at about 24 entries of `values`, spread over the tensor.
  void check(const char* name, std::vector<double>& values, const std::vector<double>& gradient) {
    ASSERT_EQ(values.size(), gradient.size()) << name;
    double size = 0;
    for (const double g : gradient) size = std::max(size, std::abs(g));
    EXPECT_GT(size, 0) << name;
    for (size_t i = 0; i < values.size(); i += 1 + values.size() / 23) {
      const double kept = values[i], h = 1e-5;
      values[i] = kept + h;
      const double high = loss();
      values[i] = kept - h;
      const double low = loss();
      values[i] = kept;
      EXPECT_NEAR(gradient[i], (high - low) / (2 * h), 1e-7 * (1 + size))
          << name << "[" << i << "]";
    }
  }

  ReferenceProblem problem_;
  std::vector<double> grad_o_, grad_state_;
};

TEST_P(ReferenceGradient, MatchesFiniteDifferences) {
  const auto grads = reference_backward(problem_, grad_o_, grad_state_);
  check("q", problem_.q, grads.q);
  check("k", problem_.k, grads.k);
  check("v", problem_.v, grads.v);
  check("beta", problem_.beta, grads.beta);
  if (!problem_.log_decay.empty()) check("log_decay", problem_.log_decay, grads.log_decay);
  check("initial_state", problem_.initial_state, grads.initial_state);
}

std::vector<GradientCase> gradient_cases() {
  std::vector<GradientCase> cases;
  for (const Rule rule : kAllRules)
    for (const bool decay : {false, true})
      for (const bool l2norm : {false, true})
        for (const bool packed : {false, true})
          if (!decay || (rule != Rule::kRk2 && rule != Rule::kRk4))
            cases.emplace_back(rule, decay, l2norm, packed);
  return cases;
}

std::string case_name(const ::testing::TestParamInfo<GradientCase>& info) {
  const auto [rule, decay, l2norm, packed] = info.param;
  return std::string(rule_name(rule)) + (decay ? "_decay" : "") + (l2norm ? "_l2norm" : "") +
         (packed ? "_packed" : "_dense");
}

INSTANTIATE_TEST_SUITE_P(Rules, ReferenceGradient, ::testing::ValuesIn(gradient_cases()),
                         case_name);

}  // namespace
}  // namespace efla
