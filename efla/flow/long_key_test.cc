// The coefficients of long keys against their definition in extended precision, whose range is wide
// enough for any float.
#include "efla/flow/long_key.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace efla {
namespace {

using Real = long double;

Real true_phi(Real x) { return x == 0 ? Real(1) : -std::expm1(-x) / x; }

struct Coefficients {
  Real erase, write;
};

// e and w of docs/mathematics.md, "Step rules", of the key itself.
Coefficients definition(Rule rule, Real beta, Real lambda, bool decay, Real g) {
  const Real a = std::exp(g), x = beta * lambda;
  if (!decay) return {beta * true_phi(x), beta * true_phi(x)};
  if (rule == Rule::kExactLog) return {beta * true_phi(x), beta * true_phi(x - g)};
  return {a * beta * true_phi(a * x), beta * true_phi(a * x - std::expm1(g))};
}

// From 10^low to 10^high, uniform in the logarithm.
rc::Gen<float> log_uniform(double low, double high) {
  return rc::gen::map(rc::gen::inRange(0, 1000001), [=](int i) {
    return static_cast<float>(std::pow(10.0, low + (high - low) * i / 1e6));
  });
}

struct Input {
  Rule rule;
  bool decay;
  float beta, lambda, unit, g;

  Real true_lambda() const { return Real(lambda) * unit * unit; }
};

Input any_input() {
  Input x;
  x.rule = *rc::gen::element(Rule::kExact, Rule::kExactLog);
  x.decay = *rc::gen::arbitrary<bool>();
  x.unit = std::ldexp(1.0f, *rc::gen::inRange(26, 127));
  x.lambda = *log_uniform(0, 3.3);
  // Steps of every size, and beta as users have it; a beta with all its digits, a times it too.
  const float beta = static_cast<float>(*log_uniform(-6, 6) / x.true_lambda());
  x.beta = std::max(1e-24f, *rc::gen::arbitrary<bool>() ? *log_uniform(-6, 2) : beta);
  x.g = x.decay ? -*log_uniform(-6, 1.5) : 0.0f;
  return x;
}

// float's own error, or what it cannot hold.
bool close(float value, Real truth, Real tolerance, Real scale = 0) {
  const Real most = std::numeric_limits<float>::max();
  truth = std::min(std::max(truth, -most), most);
  return std::abs(value - truth) <= tolerance * (std::abs(truth) + scale) + 3e-45L;
}

RC_GTEST_PROP(LongKey, CoefficientsAreThoseOfTheKeyInItsUnit, ()) {
  const Input x = any_input();
  const auto c = long_step_coefficients(x.rule, x.beta, x.lambda, x.unit, x.decay, x.g);
  const Coefficients truth = definition(x.rule, x.beta, x.true_lambda(), x.decay, x.g);
  RC_ASSERT(close(c.erase, truth.erase * x.unit * x.unit, 2e-6L));
  RC_ASSERT(close(c.write, truth.write * x.unit, 2e-6L));
  const float gate = !x.decay ? 0 : x.rule == Rule::kExact ? std::expm1(x.g) : x.g;
  RC_ASSERT(c.log_gate == gate);
  // The step is a contraction still.
  RC_ASSERT(c.erase * x.lambda <= 1 + 3e-7f);
}

// Against differences of the definition. What e^{-x} loses to the rounding of x, 1e-7 x, no formula
// avoids.
RC_GTEST_PROP(LongKey, SlopesMatchDifferences, ()) {
  const Input x = any_input();
  const StepCoefficients<float> upstream{0.7f, -1.3f, 0.9f};
  const Real unit = x.unit;
  const auto loss = [&](Real beta, Real lambda, Real g) {
    const Coefficients c = definition(x.rule, beta, lambda * unit * unit, x.decay, g);
    // Less the gate's own value, which would drown the rest.
    const Real gate = x.rule == Rule::kExact ? std::expm1(g) - std::expm1(Real(x.g)) : g - x.g;
    return upstream.log_gate * gate + upstream.erase * c.erase * unit * unit +
           upstream.write * c.write * unit;
  };
  const auto difference = [&](Real beta, Real lambda, Real g, int which) {
    const Real h = 1e-5L;
    Real low[] = {beta, lambda, g}, high[] = {beta, lambda, g};
    low[which] *= 1 - h;
    high[which] *= 1 + h;
    return (loss(high[0], high[1], high[2]) - loss(low[0], low[1], low[2])) /
           (high[which] - low[which]);
  };
  const auto grad =
      key_gradients(long_step_slopes(x.rule, x.beta, x.lambda, x.unit, x.decay, x.g), upstream);
  const Coefficients c = definition(x.rule, x.beta, x.true_lambda(), x.decay, x.g);
  // The two terms of a slope may cancel: their size is that of the coefficients over the variable.
  const Real size = std::abs(c.erase * unit * unit) + std::abs(c.write * unit);
  RC_ASSERT(close(grad.beta, difference(x.beta, x.lambda, x.g, 0), 1e-4L, size / x.beta * 1e-2L));
  RC_ASSERT(
      close(grad.lambda, difference(x.beta, x.lambda, x.g, 1), 1e-4L, size / x.lambda * 1e-2L));
  if (x.decay)
    RC_ASSERT(close(grad.log_decay, difference(x.beta, x.lambda, x.g, 2), 1e-4L, size * 1e-2L + 1));
}

TEST(LongKey, ExtremesGiveNoNaN) {
  using Limits = std::numeric_limits<float>;
  const float sizes[] = {0.f,   Limits::denorm_min(), Limits::min(), 1e-20f, 1.f,
                         1e20f, Limits::max()};
  for (const Rule rule : {Rule::kExact, Rule::kExactLog})
    for (const bool decay : {false, true})
      for (const float beta : sizes)
        for (const float lambda : {1.f, 8192.f})
          for (const float unit : {0x1p25f, 0x1p126f})
            for (const float g : sizes) {
              const auto c = long_step_coefficients(rule, beta, lambda, unit, decay, -g);
              ASSERT_TRUE(std::isfinite(c.erase) && std::isfinite(c.write))
                  << rule_name(rule) << " " << beta << " " << unit << " " << -g;
              ASSERT_GE(c.erase, 0.f);
              ASSERT_LE(c.erase * lambda, 1.000001f);
              for (const float upstream : {0.f, 1.f, -1.f}) {
                const auto in = key_gradients(long_step_slopes(rule, beta, lambda, unit, decay, -g),
                                              {upstream, upstream, -upstream});
                ASSERT_TRUE(std::isfinite(in.beta) && !std::isnan(in.lambda) &&
                            !std::isnan(in.log_decay))
                    << rule_name(rule) << " " << beta << " " << unit << " " << -g;
              }
            }
}

TEST(LongKey, UnitsAreNormalPowersOfTwoBelowTheElement) {
  EXPECT_EQ(unit_of(1.f), 1.f);
  EXPECT_EQ(unit_of(-7.9f), 4.f);
  EXPECT_EQ(unit_of(3e38f), 0x1p126f);
  EXPECT_EQ(unit_of(std::numeric_limits<float>::infinity()), 0x1p126f);
  EXPECT_EQ(unit_of(1e300), std::ldexp(1.0, 996));
  EXPECT_EQ(unit_of(std::numeric_limits<double>::max()), 0x1p1022);
  EXPECT_TRUE(is_long(std::numeric_limits<float>::infinity()));
  EXPECT_FALSE(is_long(std::numeric_limits<float>::quiet_NaN()));
  EXPECT_FALSE(is_long_key(Rule::kEuler, std::numeric_limits<float>::infinity()));
}

}  // namespace
}  // namespace efla
