// Keys so long that lambda = |k|^2 overflows, or the slopes of the exact rules, of order
// 1 / lambda^2, underflow. Nothing of the step itself does: with k = p k', p a power of two,
//
//   S_t = e^{g} (I - e' k' k'^T) S_{t-1} + w' k' v^T ,        e' = p^2 e ,   w' = p w ,
//
// so kernels use k' in the place of k, which costs no digit, and the coefficients e', w' made here;
// at the end dk = dk' / p (docs/mathematics.md, "Numerics"). The other rules are polynomials in
// beta and lambda and overflow where their value does.
#pragma once

#include <cmath>

#include "efla/flow/step_rule.h"

namespace efla {

/// Whether |x|^2 = `square` is too large to be worked with: 2^60 in float, 2^500 in double. An
/// infinite square counts, NaN does not.
template <typename T>
EFLA_HOST_DEVICE bool is_long(T square) {
  return square > (sizeof(T) == sizeof(float) ? T(0x1p60) : T(0x1p500));
}

/// Whether a key with that square is to be divided by unit_of() of its largest element.
template <typename T>
EFLA_HOST_DEVICE bool is_long_key(Rule rule, T square) {
  return (rule == Rule::kExact || rule == Rule::kExactLog) && is_long(square);
}

/// p: the power of two at or below |largest| > 0, where it and 1 / p are normal numbers.
template <typename T>
EFLA_HOST_DEVICE T unit_of(T largest) {
  constexpr int kMost = sizeof(T) == sizeof(float) ? 126 : 1022;
  const int exponent = std::ilogb(largest);
  return std::ldexp(T(1), exponent < kMost ? exponent : kMost);
}

namespace internal {

// x, where it overflowed the largest finite number instead; NaN stays.
template <typename T>
EFLA_HOST_DEVICE T bounded(T x) {
  const T most = largest_finite<T>();
  return x > most ? most : x < -most ? -most : x;
}

// strength * lambda p^2. The first product is bounded only where all of it is beyond 1e28, and may
// be multiplied by zero.
template <typename T>
EFLA_HOST_DEVICE T long_exponent(T strength, T lambda, T unit) {
  return bounded(lambda * unit) * strength * unit;
}

// e' = (1 - e^{-x}) / lambda' and its slopes, x = strength lambda.
template <typename T>
struct LongErase {
  T value;
  T strength;      // e^{-x} p^2
  T log_strength;  // the same times strength
  T lambda;        // (x e^{-x} - (1 - e^{-x})) / lambda'^2
};

template <typename T>
EFLA_HOST_DEVICE LongErase<T> long_erase(T strength, T lambda, T unit) {
  const T x = long_exponent(strength, lambda, unit);
  const T survive = std::exp(-x), gained = -std::expm1(-x);
  const T survived = survive > T(0) ? x * survive : T(0);  // x may be infinite
  const T fall = x < T(1) ? x * x * phi_derivative(x) : survived - gained;
  return {gained / lambda, bounded(survive * unit * unit), survived / lambda,
          fall / lambda / lambda};
}

// w' = p beta phi(eta), eta = beta a lambda + extra, and its slopes.
template <typename T>
struct LongWrite {
  T value;
  T beta;
  T lambda;  // of lambda', as in LongErase
  T extra;
};

template <typename T>
EFLA_HOST_DEVICE LongWrite<T> long_write(T beta, T a, T lambda, T extra, T unit) {
  const T strength = bounded(beta * unit), rate = a * lambda;
  const T eta = long_exponent(beta, rate, unit) + extra;
  const T survive = std::exp(-eta);
  if (!(eta >= T(1))) {
    const T slope = phi_derivative(eta);
    return {strength * phi(eta), unit * (survive - extra * slope),
            a * unit * strength * strength * slope, strength * slope};
  }
  const T gained = -std::expm1(-eta);
  // strength / eta.
  const T quotient =
      bounded(rate * unit <= largest_finite<T>() ? T(1) / (rate * unit + extra / strength)
                                                 : T(1) / rate / unit);
  const T fall = strength * survive - gained * quotient;
  LongWrite<T> out{gained * quotient, unit * (survive - extra / eta * (survive - gained / eta)),
                   a * unit * quotient * fall, fall / eta};
  if (eta > largest_finite<T>()) out.beta = T(0);  // extra may be infinite too
  return out;
}

}  // namespace internal

/// step_coefficients of one of the exact rules for k = unit * k', lambda = |k'|^2 near 1: {g, e',
/// w'}.
template <typename T>
EFLA_HOST_DEVICE StepCoefficients<T> long_step_coefficients(Rule rule, T beta, T lambda, T unit,
                                                            bool has_decay, T log_decay) {
  if (!has_decay) {
    const T erase = internal::long_erase(beta, lambda, unit).value;
    return {T(0), erase, erase / unit};
  }
  if (rule == Rule::kExactLog) {
    return {log_decay, internal::long_erase(beta, lambda, unit).value,
            internal::long_write(beta, T(1), lambda, -log_decay, unit).value};
  }
  const T a = std::exp(log_decay), minus_delta = std::expm1(log_decay);
  return {minus_delta, internal::long_erase(a * beta, lambda, unit).value,
          internal::long_write(beta, a, lambda, -minus_delta, unit).value};
}

/// Its partial derivatives, by beta, lambda' and log_decay.
template <typename T>
EFLA_HOST_DEVICE StepSlopes<T> long_step_slopes(Rule rule, T beta, T lambda, T unit, bool has_decay,
                                                T log_decay) {
  if (!has_decay) {
    const auto erase = internal::long_erase(beta, lambda, unit);
    return {{erase.strength, erase.lambda, T(0)},
            {erase.strength / unit, erase.lambda / unit, T(0)},
            T(0)};
  }
  if (rule == Rule::kExactLog) {
    const auto erase = internal::long_erase(beta, lambda, unit);
    const auto write = internal::long_write(beta, T(1), lambda, -log_decay, unit);
    return {{erase.strength, erase.lambda, T(0)}, {write.beta, write.lambda, -write.extra}, T(1)};
  }
  // d/dg of (a beta, a lambda, 1 - a) is (a beta, a lambda, -a).
  const T a = std::exp(log_decay);
  const auto erase = internal::long_erase(a * beta, lambda, unit);
  const auto write = internal::long_write(beta, a, lambda, -std::expm1(log_decay), unit);
  return {{a * erase.strength, erase.lambda, erase.log_strength},
          {write.beta, write.lambda, lambda * write.lambda - a * write.extra},
          a};
}

/// step_coefficients for a key divided by `unit`, 1 for all but long keys.
template <typename T>
EFLA_HOST_DEVICE StepCoefficients<T> key_coefficients(Rule rule, T beta, T lambda, T unit,
                                                      bool has_decay, T log_decay) {
  return unit == T(1) ? step_coefficients(rule, beta, lambda, has_decay, log_decay)
                      : long_step_coefficients(rule, beta, lambda, unit, has_decay, log_decay);
}

/// step_slopes for a key divided by `unit`.
template <typename T>
EFLA_HOST_DEVICE StepSlopes<T> key_slopes(Rule rule, T beta, T lambda, T unit, bool has_decay,
                                          T log_decay) {
  return unit == T(1) ? step_slopes(rule, beta, lambda, has_decay, log_decay)
                      : long_step_slopes(rule, beta, lambda, unit, has_decay, log_decay);
}

/// step_gradients for key_slopes or long_step_slopes. The gradient of beta, which for long keys may
/// be of order unit^2, is bounded by the largest finite number, for all keys.
template <typename T>
EFLA_HOST_DEVICE StepInputGradients<T> key_gradients(const StepSlopes<T>& slopes,
                                                     StepCoefficients<T> grad) {
  using internal::bounded;
  StepInputGradients<T> out = step_gradients(slopes, grad);
  out.beta =
      bounded(bounded(grad.erase * slopes.erase.beta) + bounded(grad.write * slopes.write.beta));
  return out;
}

/// step_coefficients_backward for a key divided by `unit`.
template <typename T>
EFLA_HOST_DEVICE StepInputGradients<T> key_coefficients_backward(Rule rule, T beta, T lambda,
                                                                 T unit, bool has_decay,
                                                                 T log_decay,
                                                                 StepCoefficients<T> grad) {
  return key_gradients(key_slopes(rule, beta, lambda, unit, has_decay, log_decay), grad);
}

}  // namespace efla
