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
// One header for host and device, float and double. No epsilon is added anywhere: beta = 0,
// lambda = 0 and x = 1e6 give finite values and gradients.
#pragma once

#include <cmath>

#if defined(__CUDACC__)
#define EFLA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define EFLA_HOST_DEVICE inline
#endif

namespace efla {

/// The discretisation of dS/dt = -k k^T S + k v^T over one token of duration beta.
enum class Rule : int { kLinear = 0, kEuler, kRk2, kRk4, kExact, kExactLog };

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

/// phi(x) = (1 - e^{-x}) / x, phi(0) = 1. Relative error below 1e-6 in float for every x >= 0.
template <typename T>
EFLA_HOST_DEVICE T phi(T x) {
  // Below 1e-4 the series' third term is under 2e-9; it also avoids 0/0 and subnormal quotients.
  if (x < T(1e-4) && x > T(-1e-4))
    return T(1) - x * (T(0.5) - x * (T(1) / T(6) - x * (T(1) / T(24))));
  return -std::expm1(-x) / x;
}

/// phi'(x) = (e^{-x} - phi(x)) / x, phi'(0) = -1/2. Relative error below 1e-6 in float.
template <typename T>
EFLA_HOST_DEVICE T phi_derivative(T x) {
  if (x < T(1) && x > T(-1)) {
    // sum_{n>=1} (-1)^n n x^{n-1} / (n+1)!: the direct form cancels here.
    constexpr int kTerms = sizeof(T) == 4 ? 12 : 20;
    T sum = T(0);
    T term = T(-0.5);  // (-1)^n x^{n-1} / (n+1)! * n at n = 1
    for (int n = 1; n <= kTerms; ++n) {
      sum += term;
      term *= -x * T(n + 1) / (T(n) * T(n + 2));
    }
    return sum;
  }
  return (std::exp(-x) - phi(x)) / x;
}

namespace internal {

// sum_{n<N} (-x)^n / (n+1)! and its derivative: the truncation of phi that an N-stage Runge-Kutta
// step makes.
template <int N, typename T>
EFLA_HOST_DEVICE T truncated_phi(T x) {
  if constexpr (N == 2) {
    return T(1) - x / T(2);
  } else {
    return T(1) - x * (T(0.5) - x * (T(1) / T(6) - x * (T(1) / T(24))));
  }
}

template <int N, typename T>
EFLA_HOST_DEVICE T truncated_phi_derivative(T x) {
  if constexpr (N == 2) {
    return T(-0.5);
  } else {
    return T(-0.5) + x * (T(1) / T(3) - x * (T(1) / T(8)));
  }
}

}  // namespace internal

/// The coefficients of one token. `log_decay` is ignored unless `has_decay`; rk2 and rk4 have no
/// form with decay and ignore it (callers refuse the combination).
template <typename T>
EFLA_HOST_DEVICE StepCoefficients<T> step_coefficients(Rule rule, T beta, T lambda, bool has_decay,
                                                       T log_decay) {
  const T g = has_decay ? log_decay : T(0);
  const T x = beta * lambda;
  switch (rule) {
    case Rule::kLinear:
      return {g, T(0), beta};
    case Rule::kEuler:
      return {g, beta, beta};
    case Rule::kRk2: {
      const T c = beta * internal::truncated_phi<2>(x);
      return {T(0), c, c};
    }
    case Rule::kRk4: {
      const T c = beta * internal::truncated_phi<4>(x);
      return {T(0), c, c};
    }
    case Rule::kExact: {
      if (!has_decay) {
        const T c = beta * phi(x);
        return {T(0), c, c};
      }
      const T a = std::exp(g);
      const T minus_delta = std::expm1(g);  // -(1 - a)
      return {minus_delta, a * beta * phi(a * x), beta * phi(a * x - minus_delta)};
    }
    case Rule::kExactLog:
      return {g, beta * phi(x), beta * phi(x - g)};
  }
  return {T(0), T(0), T(0)};
}

/// The chain rule through `step_coefficients`: given dL/d(log_gate, erase, write), returns
/// dL/d(beta, lambda, log_decay). d(beta phi(x))/dbeta = e^{-x}; d(beta phi(x))/dlambda =
/// beta^2 phi'(x) (docs/mathematics.md, "Gradients").
template <typename T>
EFLA_HOST_DEVICE StepInputGradients<T> step_coefficients_backward(Rule rule, T beta, T lambda,
                                                                  bool has_decay, T log_decay,
                                                                  const StepCoefficients<T>& grad) {
  const T g = has_decay ? log_decay : T(0);
  const T x = beta * lambda;
  const T both = grad.erase + grad.write;
  StepInputGradients<T> out{T(0), T(0), T(0)};
  switch (rule) {
    case Rule::kLinear:
      out.beta = grad.write;
      out.log_decay = grad.log_gate;
      break;
    case Rule::kEuler:
      out.beta = both;
      out.log_decay = grad.log_gate;
      break;
    case Rule::kRk2: {
      const T slope = internal::truncated_phi_derivative<2>(x);
      out.beta = both * (internal::truncated_phi<2>(x) + x * slope);
      out.lambda = both * beta * beta * slope;
      break;
    }
    case Rule::kRk4: {
      const T slope = internal::truncated_phi_derivative<4>(x);
      out.beta = both * (internal::truncated_phi<4>(x) + x * slope);
      out.lambda = both * beta * beta * slope;
      break;
    }
    case Rule::kExact: {
      if (!has_decay) {
        out.beta = both * std::exp(-x);
        out.lambda = both * beta * beta * phi_derivative(x);
        break;
      }
      const T a = std::exp(g);
      const T y = a * x;                // exponent of the erase factor
      const T eta = y - std::expm1(g);  // exponent of the write factor
      const T survive = std::exp(-y);
      const T write_slope = beta * phi_derivative(eta);  // dw/deta
      out.beta = grad.erase * a * survive + grad.write * (phi(eta) + write_slope * a * lambda);
      out.lambda = grad.erase * (a * beta) * (a * beta) * phi_derivative(y) +
                   grad.write * write_slope * a * beta;
      out.log_decay =
          a * (grad.log_gate + grad.erase * beta * survive + grad.write * write_slope * (x - T(1)));
      break;
    }
    case Rule::kExactLog: {
      const T write_slope = beta * phi_derivative(x - g);
      out.beta = grad.erase * std::exp(-x) + grad.write * (phi(x - g) + write_slope * lambda);
      out.lambda = grad.erase * beta * beta * phi_derivative(x) + grad.write * write_slope * beta;
      out.log_decay = grad.log_gate - grad.write * write_slope;
      break;
    }
  }
  if (!has_decay) out.log_decay = T(0);
  return out;
}

}  // namespace efla
