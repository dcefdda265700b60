#include "efla/flow/step_rule.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace efla {
namespace {

using Real = long double;

// int_0^1 f(s) ds by the 5-point Gauss rule on 64 panels: exact to long double for e^{-xs}, x <= 2.
template <typename F>
Real integrate_unit(F f) {
  const Real node1 = std::sqrt(Real(5) - 2 * std::sqrt(Real(10) / 7)) / 3;
  const Real node2 = std::sqrt(Real(5) + 2 * std::sqrt(Real(10) / 7)) / 3;
  const Real weight1 = (322 + 13 * std::sqrt(Real(70))) / 900;
  const Real weight2 = (322 - 13 * std::sqrt(Real(70))) / 900;
  constexpr int kPanels = 64;
  const Real half = Real(0.5) / kPanels;
  Real sum = 0;
  for (int i = 0; i < kPanels; ++i) {
    const Real middle = (2 * i + 1) * half;
    sum += Real(128) / 225 * f(middle) +
           weight1 * (f(middle - half * node1) + f(middle + half * node1)) +
           weight2 * (f(middle - half * node2) + f(middle + half * node2));
  }
  return half * sum;
}

// phi and phi' from their integral representations where the closed forms cancel.
Real true_phi(Real x) {
  if (x < 2) return integrate_unit([x](Real s) { return std::exp(-x * s); });
  return -std::expm1(-x) / x;
}
Real true_phi_derivative(Real x) {
  if (x < 2) return -integrate_unit([x](Real s) { return s * std::exp(-x * s); });
  return (std::exp(-x) + std::expm1(-x) / x) / x;
}

Real relative(Real value, Real truth) { return std::abs((value - truth) / truth); }

// x from 1e-30 to 1e6, uniform in log x; zero now and then.
rc::Gen<double> log_uniform(double low_exponent = -30, double high_exponent = 6) {
  return rc::gen::map(rc::gen::inRange(0, 1000000), [=](int i) {
    return i == 0 ? 0.0 : std::pow(10.0, low_exponent + (high_exponent - low_exponent) * i / 1e6);
  });
}

template <typename T>
class StepRuleAccuracy : public ::testing::Test {
 protected:
  static constexpr Real tolerance() { return sizeof(T) == 4 ? 1e-6L : 1e-13L; }

  // x = 0, then 200 points a decade from 1e-12 to 1e6, and a dense sweep around the switch points.
  static std::vector<T> sweep() {
    std::vector<T> points{T(0)};
    for (int i = 0; i <= 18 * 200; ++i) points.push_back(T(std::pow(10.0, -12 + i / 200.0)));
    for (int i = 0; i < 2000; ++i) {
      points.push_back(T(1e-4 * (0.99 + 1e-5 * i)));
      points.push_back(T(0.5 + 5e-4 * i));
    }
    return points;
  }
};
using Floats = ::testing::Types<float, double>;
TYPED_TEST_SUITE(StepRuleAccuracy, Floats);

TYPED_TEST(StepRuleAccuracy, Phi) {
  for (const TypeParam x : this->sweep())
    ASSERT_LT(relative(phi(x), true_phi(x)), this->tolerance()) << "x = " << x;
}

TYPED_TEST(StepRuleAccuracy, PhiDerivative) {
  for (const TypeParam x : this->sweep())
    ASSERT_LT(relative(phi_derivative(x), true_phi_derivative(x)), this->tolerance())
        << "x = " << x;
}

// d alpha / d lambda = beta^2 phi'(beta lambda), with x split unevenly between beta and lambda.
TYPED_TEST(StepRuleAccuracy, ExactSlopeInLambda) {
  using T = TypeParam;
  for (const T beta : {T(1e-3), T(0.37), T(1), T(5)})
    for (const T lambda : this->sweep()) {
      const Real x = Real(beta) * Real(lambda);
      const auto grad = step_coefficients_backward<T>(Rule::kExact, beta, lambda, false, T(0),
                                                      {T(0), T(1), T(0)});
      ASSERT_LT(relative(grad.lambda, Real(beta) * beta * true_phi_derivative(x)),
                this->tolerance())
          << "beta = " << beta << ", lambda = " << lambda;
      const auto step = step_coefficients<T>(Rule::kExact, beta, lambda, false, T(0));
      ASSERT_LT(relative(step.erase, beta * true_phi(x)), this->tolerance());
    }
}

TYPED_TEST(StepRuleAccuracy, LimitsAtZeroAndInfinity) {
  using T = TypeParam;
  EXPECT_EQ(phi(T(0)), T(1));
  EXPECT_EQ(phi_derivative(T(0)), T(-0.5));
  EXPECT_EQ(phi(std::numeric_limits<T>::denorm_min()), T(1));
  EXPECT_EQ(phi(std::numeric_limits<T>::infinity()), T(0));
  EXPECT_EQ(phi_derivative(std::numeric_limits<T>::infinity()), T(0));
  EXPECT_TRUE(std::isnan(phi(std::numeric_limits<T>::quiet_NaN())));
  EXPECT_TRUE(std::isnan(phi_derivative(std::numeric_limits<T>::quiet_NaN())));
}

// Every combination of extreme finite inputs, with gradients that are zero as well: no NaN, finite
// coefficients, and the bounds that make the exact step a contraction.
TYPED_TEST(StepRuleAccuracy, ExactRulesStayFiniteAtExtremes) {
  using T = TypeParam;
  using Limits = std::numeric_limits<T>;
  const T sizes[] = {
      T(0),    Limits::denorm_min(), Limits::min(), T(1e-20), T(1e-4), T(1), T(50), T(1e6),
      T(1e20), Limits::max()};
  std::vector<T> lambdas(std::begin(sizes), std::end(sizes));
  lambdas.push_back(Limits::infinity());  // |k|^2 of a finite key can overflow
  for (const Rule rule : {Rule::kExact, Rule::kExactLog})
    for (const bool decay : {false, true})
      for (const T beta : sizes)
        for (const T lambda : lambdas)
          for (const T g : sizes) {
            const auto step = step_coefficients<T>(rule, beta, lambda, decay, -g);
            ASSERT_TRUE(std::isfinite(step.log_gate) && std::isfinite(step.erase) &&
                        std::isfinite(step.write))
                << beta << " " << lambda << " " << -g;
            ASSERT_LE(step.log_gate, T(0));
            ASSERT_GE(step.erase, T(0));
            ASSERT_LE(step.erase, beta);
            ASSERT_LE(step.write, beta);
            for (const T upstream : {T(0), T(1)}) {
              const auto grad = step_coefficients_backward<T>(rule, beta, lambda, decay, -g,
                                                              {upstream, upstream, upstream});
              ASSERT_FALSE(std::isnan(grad.beta) || std::isnan(grad.lambda) ||
                           std::isnan(grad.log_decay))
                  << beta << " " << lambda << " " << -g << " upstream " << upstream;
            }
          }
}

// Where beta * lambda overflows, alpha is still 1 / lambda and its slope -1 / lambda^2.
TYPED_TEST(StepRuleAccuracy, OverflowingProductKeepsTheLimit) {
  using T = TypeParam;
  const T beta = std::numeric_limits<T>::max() / 2, lambda = 1024;
  for (const Rule rule : {Rule::kExact, Rule::kExactLog}) {
    const auto step = step_coefficients<T>(rule, beta, lambda, false, T(0));
    EXPECT_LT(relative(step.erase, 1 / Real(1024)), this->tolerance());
    EXPECT_LT(relative(step.write, 1 / Real(1024)), this->tolerance());
    const auto grad =
        step_coefficients_backward<T>(rule, beta, lambda, false, T(0), {T(0), T(1), T(0)});
    EXPECT_LT(relative(grad.lambda, -1 / Real(1024 * 1024)), this->tolerance());
  }
}

RC_GTEST_PROP(StepRuleProperty, ExactCoefficientIsBoundedByBothLimits, ()) {
  // 0 <= alpha <= min(beta, 1/lambda): never more than Euler's step, never past full erasure.
  const double lambda = *log_uniform(-20, 6), beta = *log_uniform(-10, 2);
  const double alpha = step_coefficients<double>(Rule::kExact, beta, lambda, false, 0.0).erase;
  RC_ASSERT(alpha >= 0 && alpha <= beta);
  RC_ASSERT(alpha * lambda <= 1 + 1e-15);
  const float alpha_float =
      step_coefficients<float>(Rule::kExact, float(beta), float(lambda), false, 0.0f).erase;
  RC_ASSERT(alpha_float * float(lambda) <= 1 + 2e-7f);
}

RC_GTEST_PROP(StepRuleProperty, FloatAgreesWithLongDouble, ()) {
  const float x = float(*log_uniform());
  RC_ASSERT(relative(phi(x), true_phi(x)) < 1e-6L);
  RC_ASSERT(relative(phi_derivative(x), true_phi_derivative(x)) < 1e-6L);
}

RC_GTEST_PROP(StepRuleProperty, PhiDecreasesAndIsConvex, ()) {
  const double x = *log_uniform(-6, 6), y = x * 1.01;
  RC_ASSERT(phi(y) <= phi(x));
  RC_ASSERT(phi_derivative(y) >= phi_derivative(x));
}

// The coefficients with decay, written as in the table of docs/mathematics.md, in long double.
RC_GTEST_PROP(StepRuleProperty, GatedCoefficientsInFloat, ()) {
  const float beta = float(*log_uniform(-6, 1)), lambda = float(*log_uniform(-12, 5));
  const float g = -float(*log_uniform(-8, 1.3));
  const Real a = std::exp(Real(g)), x = Real(beta) * lambda;
  const auto paper = step_coefficients<float>(Rule::kExact, beta, lambda, true, g);
  const auto log_form = step_coefficients<float>(Rule::kExactLog, beta, lambda, true, g);
  const auto close = [](float value, Real truth) {
    return std::abs(value - truth) <= 1e-6L * std::abs(truth) + 1e-44L;
  };
  RC_ASSERT(close(paper.log_gate, std::expm1(Real(g))));
  RC_ASSERT(close(paper.erase, a * beta * true_phi(a * x)));
  RC_ASSERT(close(paper.write, beta * true_phi(a * x - std::expm1(Real(g)))));
  RC_ASSERT(log_form.log_gate == g);
  RC_ASSERT(close(log_form.erase, beta * true_phi(x)));
  RC_ASSERT(close(log_form.write, beta * true_phi(x - Real(g))));
}

// Every derivative of every rule against central differences of the coefficients in long double.
RC_GTEST_PROP(StepRuleProperty, DerivativesMatchDifferences, ()) {
  const double inputs[3] = {*log_uniform(-3, 1), *log_uniform(-3, 2), -*log_uniform(-3, 0.7)};
  const auto rule = *rc::gen::element(Rule::kLinear, Rule::kEuler, Rule::kRk2, Rule::kRk4,
                                      Rule::kExact, Rule::kExactLog);
  const bool decay = *rc::gen::arbitrary<bool>();  // which rk2 and rk4 ignore
  const StepCoefficients<double> upstream{0.7, -1.3, 0.9};
  const auto loss = [&](Real beta, Real lambda, Real g) {
    const auto step = step_coefficients<Real>(rule, beta, lambda, decay, g);
    return upstream.log_gate * step.log_gate + upstream.erase * step.erase +
           upstream.write * step.write;
  };
  const auto grad =
      step_coefficients_backward<double>(rule, inputs[0], inputs[1], decay, inputs[2], upstream);
  const double derivatives[3] = {grad.beta, grad.lambda, grad.log_decay};
  for (int i = 0; i < 3; ++i) {
    Real low[3] = {inputs[0], inputs[1], inputs[2]}, high[3] = {inputs[0], inputs[1], inputs[2]};
    const Real h = 1e-6L * (std::abs(low[i]) + 1e-3L);
    low[i] -= h;
    high[i] += h;
    const Real difference =
        (loss(high[0], high[1], high[2]) - loss(low[0], low[1], low[2])) / (2 * h);
    const Real size = std::abs(difference) + inputs[0] + 1e-3L;
    RC_ASSERT(std::abs(derivatives[i] - difference) < 1e-8L * size);
  }
}

TEST(StepRule, InfinitelyStrongDecayErasesAndWritesNothing) {
  const float minus_infinity = -std::numeric_limits<float>::infinity();
  for (const float beta : {0.0f, 0.5f, 3.0f}) {
    const auto c = step_coefficients(Rule::kExactLog, beta, 2.0f, true, minus_infinity);
    EXPECT_EQ(c.log_gate, minus_infinity);
    EXPECT_EQ(c.write, 0);  // beta phi(infinity), whatever beta is: so is its derivative
    const auto in = step_coefficients_backward<float>(Rule::kExactLog, beta, 2.0f, true,
                                                      minus_infinity, {0, 0, 1});
    EXPECT_EQ(in.beta, 0);
    EXPECT_EQ(in.lambda, 0);
    EXPECT_EQ(in.log_decay, 0);
  }
}

TEST(StepRule, NamesGoBothWays) {
  for (const Rule rule : kAllRules) EXPECT_EQ(rule_from_name(rule_name(rule)), rule);
  EXPECT_EQ(rule_from_name("exact_log"), Rule::kExactLog);
  for (const char* unknown : {"", "?", "Exact", "exact "})
    EXPECT_FALSE(rule_from_name(unknown).has_value()) << unknown;
}

TEST(StepRule, TableOfRules) {
  const double beta = 0.8, lambda = 3, x = 2.4, g = -0.4, a = std::exp(g);
  const auto expect = [&](Rule rule, bool decay, double gate, double erase, double write) {
    const auto step = step_coefficients<double>(rule, beta, lambda, decay, g);
    EXPECT_NEAR(step.log_gate, gate, 1e-15);
    EXPECT_NEAR(step.erase, erase, 1e-15);
    EXPECT_NEAR(step.write, write, 1e-15);
  };
  const double rk2 = beta * (1 - x / 2);
  const double rk4 = beta * (1 - x / 2 + x * x / 6 - x * x * x / 24);
  const double exact = (1 - std::exp(-x)) / lambda;
  expect(Rule::kLinear, false, 0, 0, beta);
  expect(Rule::kLinear, true, g, 0, beta);
  expect(Rule::kEuler, false, 0, beta, beta);
  expect(Rule::kEuler, true, g, beta, beta);
  expect(Rule::kRk2, false, 0, rk2, rk2);
  expect(Rule::kRk4, false, 0, rk4, rk4);
  expect(Rule::kExact, false, 0, exact, exact);
  expect(Rule::kExactLog, false, 0, exact, exact);
  const double eta = (1 - a) + a * x;
  expect(Rule::kExact, true, -(1 - a), (1 - std::exp(-a * x)) / lambda,
         beta * (1 - std::exp(-eta)) / eta);
  expect(Rule::kExactLog, true, g, exact, beta * (1 - std::exp(-(x - g))) / (x - g));
}

}  // namespace
}  // namespace efla
