// The step rules against the differential equations that they claim to solve, one token at a time,
// and the identities that follow from the solution.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "efla/flow/reference.h"
#include "efla/flow/test_support.h"

namespace efla {
namespace {

using namespace efla::testing;  // NOLINT(google-build-using-namespace): test helpers

// One token of one head: its key, value and the state before it.
struct Token {
  Matrix k, v, state;  // [K, 1], [V, 1], [K, V]
  double lambda() const { return dot(k.data, k.data); }
};

Token random_token(uint64_t seed, double lambda) {
  std::mt19937_64 random(seed);
  Token token{column(normal(random, 5)), column(normal(random, 3)),
              Matrix(5, 3, normal(random, 15).data())};
  token.k = (std::sqrt(lambda) / norm(token.k.data)) * token.k;
  return token;
}

Matrix step(Rule rule, const Token& token, double beta, const double* log_decay = nullptr) {
  ReferenceProblem p;
  p.tokens = 1;
  p.key_dim = token.k.rows;
  p.value_dim = token.v.rows;
  p.rule = rule;
  p.q = p.k = token.k.data;
  p.v = token.v.data;
  p.beta = {beta};
  if (log_decay != nullptr) p.log_decay = {*log_decay};
  p.initial_state = token.state.data;
  return Matrix(p.key_dim, p.value_dim, reference_forward(p).final_state.data());
}

// dS/dt = -M S + B over `duration` by `steps` classical Runge-Kutta steps.
Matrix integrate(const Matrix& m, const Matrix& b, Matrix state, double duration, int steps) {
  const double h = duration / steps;
  const auto slope = [&](const Matrix& s) { return b - m * s; };
  for (int i = 0; i < steps; ++i) {
    const Matrix k1 = slope(state), k2 = slope(state + (h / 2) * k1);
    const Matrix k3 = slope(state + (h / 2) * k2), k4 = slope(state + h * k3);
    state = state + (h / 6) * (k1 + 2.0 * k2 + 2.0 * k3 + k4);
  }
  return state;
}

TEST(ExactFlow, SolvesTheDeltaRuleEquation) {
  uint64_t seed = 1;
  for (const double beta : {0.05, 0.5, 1.0, 3.0})
    for (const double lambda : {1e-6, 0.1, 1.0, 8.0}) {
      const Token token = random_token(seed++, lambda);
      const Matrix a = token.k * token.k.transposed(), b = token.k * token.v.transposed();
      const Matrix fine = integrate(a, b, token.state, beta, 4000);
      EXPECT_LT(relative_error(step(Rule::kExact, token, beta).data, fine.data), 1e-11);
      EXPECT_LT(relative_error(step(Rule::kExactLog, token, beta).data, fine.data), 1e-11);
    }
}

// Appendix D of the paper: generator -[(1-a) I + a beta k k^T], source beta k v^T, unit time.
TEST(ExactFlow, SolvesTheGatedEquationOfThePaper) {
  uint64_t seed = 100;
  for (const double g : {-1e-4, -0.3, -2.0, -15.0})
    for (const double beta : {0.3, 1.5})
      for (const double lambda : {1e-6, 1.0, 8.0}) {
        const Token token = random_token(seed++, lambda);
        const double a = std::exp(g);
        const Matrix generator =
            (1 - a) * identity(5) + (a * beta) * (token.k * token.k.transposed());
        const Matrix fine =
            integrate(generator, beta * (token.k * token.v.transposed()), token.state, 1, 4000);
        EXPECT_LT(relative_error(step(Rule::kExact, token, beta, &g).data, fine.data), 1e-11);
      }
}

// The log-decay reading: generator -[-g I + beta k k^T], source beta k v^T, unit time.
TEST(ExactFlow, SolvesTheLogDecayEquation) {
  uint64_t seed = 200;
  for (const double g : {-1e-4, -0.3, -2.0, -15.0})
    for (const double beta : {0.3, 1.5})
      for (const double lambda : {1e-6, 1.0, 8.0}) {
        const Token token = random_token(seed++, lambda);
        const Matrix generator = -g * identity(5) + beta * (token.k * token.k.transposed());
        const Matrix fine =
            integrate(generator, beta * (token.k * token.v.transposed()), token.state, 1, 4000);
        EXPECT_LT(relative_error(step(Rule::kExactLog, token, beta, &g).data, fine.data), 1e-10);
      }
}

// rk2 and rk4 are one actual Runge-Kutta step of length beta, also where that step is unstable.
TEST(RungeKutta, IsOneStepOfTheMethod) {
  uint64_t seed = 300;
  for (const double beta : {0.1, 1.0, 2.0})
    for (const double lambda : {0.3, 1.0, 2.55, 40.0}) {
      const Token token = random_token(seed++, lambda);
      const Matrix a = token.k * token.k.transposed(), b = token.k * token.v.transposed();
      const Matrix euler = token.state + beta * (b - a * token.state);
      const Matrix middle = token.state + (beta / 2) * (b - a * token.state);
      const Matrix midpoint = token.state + beta * (b - a * middle);
      EXPECT_LT(relative_error(step(Rule::kEuler, token, beta).data, euler.data), 1e-13);
      EXPECT_LT(relative_error(step(Rule::kRk2, token, beta).data, midpoint.data), 1e-13);
      EXPECT_LT(relative_error(step(Rule::kRk4, token, beta).data,
                               integrate(a, b, token.state, beta, 1).data),
                1e-13);
    }
}

// The error of an order-N step falls like beta^{N+1}.
TEST(RungeKutta, ConvergesToTheExactFlowAtItsOrder) {
  const Token token = random_token(7, 1.0);
  const auto error = [&](Rule rule, double beta) {
    return norm((step(rule, token, beta) - step(Rule::kExact, token, beta)).data);
  };
  const std::pair<Rule, int> orders[] = {{Rule::kEuler, 1}, {Rule::kRk2, 2}, {Rule::kRk4, 4}};
  for (const auto& [rule, order] : orders)
    EXPECT_NEAR(std::log2(error(rule, 0.02) / error(rule, 0.01)), order + 1, 0.05)
        << rule_name(rule);
}

// EFLA(k, v, beta) == DeltaNet(k/|k|, v/|k|, 1 - e^{-beta |k|^2}) over a whole sequence.
TEST(Identity, ExactIsDeltaNetWithNormalisedKeys) {
  ReferenceProblem exact = single_head(Rule::kExact, 40, 6, 4, 11);
  ReferenceProblem delta = exact;
  delta.rule = Rule::kEuler;
  for (int64_t t = 0; t < exact.tokens; ++t) {
    double lambda = 0;
    for (int64_t i = 0; i < 6; ++i) lambda += exact.k[t * 6 + i] * exact.k[t * 6 + i];
    const double length = std::sqrt(lambda);
    for (int64_t i = 0; i < 6; ++i) delta.k[t * 6 + i] /= length;
    for (int64_t j = 0; j < 4; ++j) delta.v[t * 4 + j] /= length;
    delta.beta[t] = 1 - std::exp(-exact.beta[t] * lambda);
  }
  const auto left = reference_forward(exact), right = reference_forward(delta);
  EXPECT_LT(relative_error(left.o, right.o), 1e-13);
  EXPECT_LT(relative_error(left.final_state, right.final_state), 1e-13);
}

// Unit keys: beta = softplus(z) under the exact rule is beta = sigmoid(z) under Euler, outputs and
// the gradient with respect to z alike.
TEST(Identity, UnitKeysWithSoftplusAreDeltaNetWithSigmoid) {
  ReferenceProblem exact = single_head(Rule::kExact, 30, 6, 4, 12);
  for (int64_t t = 0; t < exact.tokens; ++t) {
    double lambda = 0;
    for (int64_t i = 0; i < 6; ++i) lambda += exact.k[t * 6 + i] * exact.k[t * 6 + i];
    for (int64_t i = 0; i < 6; ++i) exact.k[t * 6 + i] /= std::sqrt(lambda);
  }
  ReferenceProblem delta = exact;
  delta.rule = Rule::kEuler;
  std::mt19937_64 random(13);
  const std::vector<double> z = normal(random, exact.tokens, 2);
  std::vector<double> sigmoid(z.size());
  for (size_t t = 0; t < z.size(); ++t) {
    sigmoid[t] = 1 / (1 + std::exp(-z[t]));
    exact.beta[t] = std::log1p(std::exp(z[t]));
    delta.beta[t] = sigmoid[t];
  }
  EXPECT_LT(relative_error(reference_forward(exact).o, reference_forward(delta).o), 1e-13);

  const std::vector<double> grad_o = normal(random, exact.tokens * 4);
  std::vector<double> left = reference_backward(exact, grad_o).beta;
  std::vector<double> right = reference_backward(delta, grad_o).beta;
  for (size_t t = 0; t < z.size(); ++t) {
    left[t] *= sigmoid[t];                      // softplus'
    right[t] *= sigmoid[t] * (1 - sigmoid[t]);  // sigmoid'
  }
  EXPECT_LT(relative_error(left, right), 1e-12);
}

// alpha = beta - beta^2 lambda / 2 + O(beta x^2): the delta rule for small x.
TEST(Identity, SmallStepsAreTheDeltaRule) {
  for (const double x : {0.0, 1e-12, 1e-9, 1e-6, 1e-4, 1e-3}) {
    const double beta = 0.5, lambda = x / beta;
    const double alpha = step_coefficients<double>(Rule::kExact, beta, lambda, false, 0).erase;
    EXPECT_NEAR(alpha, beta * (1 - x / 2), beta * (x * x / 6 + 1e-16));
    // In float the shrinkage x/2 must survive as far as the type can hold it.
    const float alpha_float =
        step_coefficients<float>(Rule::kExact, float(beta), float(lambda), false, 0).erase;
    EXPECT_NEAR(alpha_float / beta, 1 - x / 2, x * x / 6 + 1.2e-7);
  }
}

TEST(Identity, ZeroKeyAndZeroBetaLeaveTheStateAlone) {
  for (const Rule rule : kAllRules) {
    const Token zero_key = random_token(14, 0.0);
    EXPECT_EQ(step(rule, zero_key, 0.7).data, zero_key.state.data) << rule_name(rule);
    const Token token = random_token(15, 2.0);
    EXPECT_EQ(step(rule, token, 0.0).data, token.state.data) << rule_name(rule);
  }
}

// For every key norm the exact step shrinks what it recalls by e^{-x} and leaves the rest.
RC_GTEST_PROP(Contraction, EveryKeyNorm, ()) {
  const double lambda = std::pow(10.0, *rc::gen::inRange(-3000, 601) / 100.0);
  const double beta = std::pow(10.0, *rc::gen::inRange(-300, 101) / 100.0);
  const double g = -std::pow(10.0, *rc::gen::inRange(-800, 101) / 100.0);
  Token token = random_token(*rc::gen::arbitrary<uint32_t>(), lambda);
  token.v = 0.0 * token.v;
  const Matrix next = step(Rule::kExact, token, beta);
  RC_ASSERT(norm(next.data) <= norm(token.state.data) * (1 + 1e-12));
  for (const Rule rule : {Rule::kExact, Rule::kExactLog})
    RC_ASSERT(norm(step(rule, token, beta, &g).data) <= norm(token.state.data) * (1 + 1e-12));

  const Matrix direction = (1 / norm(token.k.data)) * token.k;
  const Matrix along = direction.transposed() * token.state;
  const Matrix along_next = direction.transposed() * next;
  RC_ASSERT(norm((along_next - std::exp(-beta * lambda) * along).data) <=
            1e-12 * norm(token.state.data));
  const Matrix rest = (token.state - direction * along) - (next - direction * along_next);
  RC_ASSERT(norm(rest.data) <= 1e-12 * norm(token.state.data));
}

// What the exact step is for: at x = 5.1 the finite orders leave the unit interval.
TEST(Contraction, FiniteOrdersExpandAtLargeSteps) {
  Token token = random_token(16, 5.1);
  token.v = 0.0 * token.v;
  const Matrix before = token.k.transposed() * token.state;
  const auto factor = [&](Rule rule) {
    const Matrix after = token.k.transposed() * step(rule, token, 1.0);
    return after(0, 0) / before(0, 0);
  };
  const double x = 5.1;
  EXPECT_NEAR(factor(Rule::kEuler), 1 - x, 1e-10);
  EXPECT_NEAR(factor(Rule::kRk2), 1 - x + x * x / 2, 1e-10);
  EXPECT_NEAR(factor(Rule::kRk4), 1 - x + x * x / 2 - x * x * x / 6 + x * x * x * x / 24, 1e-10);
  EXPECT_NEAR(factor(Rule::kExact), std::exp(-x), 1e-12);
}

}  // namespace
}  // namespace efla
