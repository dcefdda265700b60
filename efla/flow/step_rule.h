// Step rules: from (beta, lambda = |k|^2, log-decay) of one token to the three scalars of the
// recurrence that every system of this project shares,
//
//   S_t = e^{g} (I - e k k^T) S_{t-1} + w k v^T ,        o_t = scale * S_t^T q_t .
//
// With x = beta * lambda and phi(x) = (1 - e^{-x}) / x the rules are (docs/mathematics.md, "Step
// rules"):
//
//   rule       g                       e                                w
//   linear     log_decay               0                                beta
//   euler      log_decay               beta                             beta
//   rk2, rk4   0                       beta * sum_{n<N} (-x)^n/(n+1)!   same, N = 2 or 4
//   exact      0                       beta phi(x)                      same
//   exact      -(1-a), a=e^log_decay   a beta phi(a x)                  beta phi((1-a) + a x)
//   exact_log  log_decay               beta phi(x)                      beta phi(x - log_decay)
//
// One header for host and device, float and double. No epsilon is added anywhere: the exact rules
// give finite coefficients and no NaN for every finite beta >= 0, lambda >= 0 and log_decay <= 0,
// subnormals and overflowing products included (docs/mathematics.md, "Numerics"). Device code must
// not be compiled with fast-math exponentials: the accuracy stated here rests on exp and expm1.
#pragma once

#include <cfloat>
#include <cmath>
#include <optional>
#include <string_view>

#if defined(__CUDACC__)
#define EFLA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define EFLA_HOST_DEVICE inline
#endif

namespace efla {

/// The discretisation of dS/dt = -k k^T S + k v^T over one token of duration beta.
enum class Rule : int { kLinear = 0, kEuler, kRk2, kRk4, kExact, kExactLog };

inline constexpr Rule kAllRules[] = {Rule::kLinear, Rule::kEuler, Rule::kRk2,
                                     Rule::kRk4,    Rule::kExact, Rule::kExactLog};

/// The name users write, as in the table above. Host only, like rule_from_name.
inline const char* rule_name(Rule rule) {
  switch (rule) {
    case Rule::kLinear:
      return "linear";
    case Rule::kEuler:
      return "euler";
    case Rule::kRk2:
      return "rk2";
    case Rule::kRk4:
      return "rk4";
    case Rule::kExact:
      return "exact";
    case Rule::kExactLog:
      return "exact_log";
  }
  return "?";
}

/// The rule called `name`; none if there is no such rule.
inline std::optional<Rule> rule_from_name(std::string_view name) {
  for (const Rule rule : kAllRules)
    if (name == rule_name(rule)) return rule;
  return std::nullopt;
}

/// Whether the rule removes anything from the state: e = 0 for every token otherwise.
constexpr EFLA_HOST_DEVICE bool erases(Rule rule) { return rule != Rule::kLinear; }

/// The three scalars of one step. log_gate <= 0 for log_decay <= 0; all finite for finite input.
template <typename T>
struct StepCoefficients {
  T log_gate;  // g: natural logarithm of the decay of the whole state
  T erase;     // e: how much of the state along k is removed
  T write;     // w: how much of k v^T is added
};

/// Gradients of a scalar loss with respect to the inputs of a step rule.
template <typename T>
struct StepInputGradients {
  T beta;
  T lambda;
  T log_decay;
};

namespace internal {

// Nested (Horner) evaluation of the alternating series whose term ratio is -x * num / den, from
// term N to term `Last`; the quotients fold into constants.

// phi(x) = 1 - x/2 (1 - x/3 (1 - x/4 (...))).
template <int N, int Last, typename T>
EFLA_HOST_DEVICE T phi_series(T x) {
  if constexpr (N > Last) {
    return T(1);
  } else {
    return T(1) - x * T(1.0 / (N + 1)) * phi_series<N + 1, Last>(x);
  }
}

// phi'(x) = -1/2 (1 - x 2/(1*3) (1 - x 3/(2*4) (...))): term n is (-1)^n n x^{n-1} / (n+1)!.
template <int N, int Last, typename T>
EFLA_HOST_DEVICE T phi_derivative_series(T x) {
  if constexpr (N > Last) {
    return T(1);
  } else {
    return T(1) - x * T((N + 1.0) / (N * (N + 2.0))) * phi_derivative_series<N + 1, Last>(x);
  }
}

// e^{-x} cut after the term (-x)^Last / Last!.
template <int N, int Last, typename T>
EFLA_HOST_DEVICE T exp_series(T x) {
  if constexpr (N > Last) {
    return T(1);
  } else {
    return T(1) - x * T(1.0 / N) * exp_series<N + 1, Last>(x);
  }
}

template <typename T>
EFLA_HOST_DEVICE T largest_finite() {
  if constexpr (sizeof(T) == sizeof(float)) {
    return FLT_MAX;
  } else {
    return DBL_MAX;
  }
}

}  // namespace internal

/// phi(x) = (1 - e^{-x}) / x, phi(0) = 1. Relative error below 2e-7 in float and 5e-16 in double
/// for every x >= 0.
template <typename T>
EFLA_HOST_DEVICE T phi(T x) {
  // Below 1e-4 the first dropped term, x^4/120, is under 1e-18; this branch also avoids 0/0.
  if (x < T(1e-4) && x > T(-1e-4)) return internal::phi_series<1, 3>(x);
  return -std::expm1(-x) / x;
}

/// phi'(x) = (e^{-x} - phi(x)) / x, phi'(0) = -1/2. Relative error below 1e-6 in float and 2e-15 in
/// double for 0 <= x <= 1e6 (beyond 1e19 in float the result underflows to zero).
template <typename T>
EFLA_HOST_DEVICE T phi_derivative(T x) {
  // The closed form loses a factor 2/x of accuracy, so below 1 the series takes over.
  constexpr int kTerms = sizeof(T) == sizeof(float) ? 11 : 19;
  if (x < T(1) && x > T(-1)) return T(-0.5) * internal::phi_derivative_series<1, kTerms>(x);
  return (std::exp(-x) - phi(x)) / x;
}

namespace internal {

// beta / eta, divided through by beta where eta overflows: a huge beta still gives 1 / rate.
template <typename T>
EFLA_HOST_DEVICE T beta_over_eta(T beta, T rate, T extra, T eta) {
  return eta <= largest_finite<T>() ? beta / eta : T(1) / (rate + extra / beta);
}

// One term of the exact flow, beta phi(eta) with eta = beta * rate + extra: both coefficients of
// every exact rule have this form (docs/mathematics.md, "Gated rules"). beta, rate, extra >= 0.
template <typename T>
EFLA_HOST_DEVICE T flow_term(T beta, T rate, T extra) {
  const T eta = beta * rate + extra;
  if (!(eta >= T(1))) return beta * phi(eta);
  return -std::expm1(-eta) * beta_over_eta(beta, rate, extra, eta);
}

// Partial derivatives of flow_term.
template <typename T>
struct FlowSlopes {
  T beta;   // e^{-eta} - extra phi'(eta)
  T rate;   // beta^2 phi'(eta)
  T extra;  // beta phi'(eta)
};

template <typename T>
EFLA_HOST_DEVICE FlowSlopes<T> flow_term_slopes(T beta, T rate, T extra) {
  const T eta = beta * rate + extra;
  const T survive = std::exp(-eta);
  FlowSlopes<T> slopes;
  if (!(eta >= T(1))) {
    const T slope = phi_derivative(eta);
    slopes = {survive - extra * slope, beta * (beta * slope), beta * slope};
  } else {
    const T gained = -std::expm1(-eta);
    const T quotient = beta_over_eta(beta, rate, extra, eta);
    const T fall = beta * survive - gained * quotient;  // beta eta phi'(eta)
    slopes = {survive - (extra / eta) * (survive - gained / eta), fall * quotient, fall / eta};
    // An infinite extra would give infinity / infinity, times zero.
    if (eta > largest_finite<T>()) slopes.beta = T(0);
  }
  // Only beta > 1e19 (float) gets here: an infinite slope times a zero gradient would be NaN.
  if (slopes.rate < -largest_finite<T>()) slopes.rate = -largest_finite<T>();
  return slopes;
}

}  // namespace internal

/// |k|^2 of a finite key can overflow; long_key.h has the coefficients of such keys. Here the token
/// is skipped: a coefficient of 0 keeps the step a contraction, while any other finite stand-in for
/// 1 / |k|^2 would be too large.
template <typename T>
EFLA_HOST_DEVICE bool key_overflows(Rule rule, T lambda) {
  return lambda > internal::largest_finite<T>() &&
         (rule == Rule::kExact || rule == Rule::kExactLog);
}

/// The coefficients of one token. `log_decay` is ignored unless `has_decay`; rk2 and rk4 have no
/// form with decay and ignore it (callers refuse the combination).
template <typename T>
EFLA_HOST_DEVICE StepCoefficients<T> step_coefficients(Rule rule, T beta, T lambda, bool has_decay,
                                                       T log_decay) {
  const T g = has_decay ? log_decay : T(0);
  if (key_overflows(rule, lambda)) beta = lambda = T(0);
  switch (rule) {
    case Rule::kLinear:
      return {g, T(0), beta};
    case Rule::kEuler:
      return {g, beta, beta};
    case Rule::kRk2: {
      const T c = beta * internal::phi_series<1, 1>(beta * lambda);
      return {T(0), c, c};
    }
    case Rule::kRk4: {
      const T c = beta * internal::phi_series<1, 3>(beta * lambda);
      return {T(0), c, c};
    }
    case Rule::kExact: {
      if (!has_decay) {
        const T c = internal::flow_term(beta, lambda, T(0));
        return {T(0), c, c};
      }
      const T a = std::exp(g);
      const T minus_delta = std::expm1(g);  // -(1 - a)
      return {minus_delta, internal::flow_term(a * beta, lambda, T(0)),
              internal::flow_term(beta, a * lambda, -minus_delta)};
    }
    case Rule::kExactLog:
      return {g, internal::flow_term(beta, lambda, T(0)), internal::flow_term(beta, lambda, -g)};
  }
  return {T(0), T(0), T(0)};
}

/// The partial derivatives of the coefficients; what is not there is zero.
template <typename T>
struct StepSlopes {
  StepInputGradients<T> erase, write;  // de, dw by each of the inputs
  T log_gate;                          // dg by log_decay
};

/// Those of `step_coefficients` (docs/mathematics.md, "Gradients"). For the exact rules they are
/// finite for every finite beta >= 0, lambda >= 0 and log_decay <= 0.
template <typename T>
EFLA_HOST_DEVICE StepSlopes<T> step_slopes(Rule rule, T beta, T lambda, bool has_decay,
                                           T log_decay) {
  const T g = has_decay ? log_decay : T(0);
  const T gate = has_decay ? T(1) : T(0);
  StepSlopes<T> out{{T(0), T(0), T(0)}, {T(0), T(0), T(0)}, gate};
  if (key_overflows(rule, lambda)) {
    if (rule == Rule::kExact && has_decay) out.log_gate = std::exp(g);
    return out;
  }
  switch (rule) {
    case Rule::kLinear:
      out.write.beta = T(1);
      break;
    case Rule::kEuler:
      out.erase.beta = out.write.beta = T(1);
      break;
    case Rule::kRk2:
      out.erase.beta = internal::exp_series<1, 1>(beta * lambda);
      out.erase.lambda = beta * beta * T(-0.5);
      out.write = out.erase;
      out.log_gate = T(0);
      break;
    case Rule::kRk4: {
      const T x = beta * lambda;
      out.erase.beta = internal::exp_series<1, 3>(x);
      out.erase.lambda = beta * beta * T(-0.5) * internal::phi_derivative_series<1, 2>(x);
      out.write = out.erase;
      out.log_gate = T(0);
      break;
    }
    case Rule::kExact: {
      if (!has_decay) {
        const auto term = internal::flow_term_slopes(beta, lambda, T(0));
        out.erase = out.write = {term.beta, term.rate, T(0)};
        break;
      }
      const T a = std::exp(g);
      const T strength = a * beta, rate = a * lambda;
      const auto erase = internal::flow_term_slopes(strength, lambda, T(0));
      const auto write = internal::flow_term_slopes(beta, rate, -std::expm1(g));
      // d/dg of (a beta, a lambda, 1 - a) is (a beta, a lambda, -a).
      out.erase = {a * erase.beta, erase.rate, strength * erase.beta};
      out.write = {write.beta, a * write.rate, rate * write.rate - a * write.extra};
      out.log_gate = a;
      break;
    }
    case Rule::kExactLog: {
      const auto erase = internal::flow_term_slopes(beta, lambda, T(0));
      const auto write = internal::flow_term_slopes(beta, lambda, -g);
      out.erase = {erase.beta, erase.rate, T(0)};
      out.write = {write.beta, write.rate, has_decay ? -write.extra : T(0)};
      break;
    }
  }
  return out;
}

/// The chain rule through `step_coefficients`: given dL/d(log_gate, erase, write), returns
/// dL/d(beta, lambda, log_decay).
template <typename T>
EFLA_HOST_DEVICE StepInputGradients<T> step_gradients(const StepSlopes<T>& slopes,
                                                      StepCoefficients<T> grad) {
  return {grad.erase * slopes.erase.beta + grad.write * slopes.write.beta,
          grad.erase * slopes.erase.lambda + grad.write * slopes.write.lambda,
          grad.log_gate * slopes.log_gate + grad.erase * slopes.erase.log_decay +
              grad.write * slopes.write.log_decay};
}

/// The same from the inputs of the rule.
template <typename T>
EFLA_HOST_DEVICE StepInputGradients<T> step_coefficients_backward(Rule rule, T beta, T lambda,
                                                                  bool has_decay, T log_decay,
                                                                  StepCoefficients<T> grad) {
  return step_gradients(step_slopes(rule, beta, lambda, has_decay, log_decay), grad);
}

}  // namespace efla
