#include "efla/flow/reference.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "efla/flow/long_key.h"

namespace efla {
namespace {

constexpr double kL2NormEps = 1e-6;
constexpr int64_t kSegment = 64;  // tokens between two states that backward keeps

void check_size(const char* name, const std::vector<double>& values, int64_t expected,
                bool may_be_empty) {
  const auto size = static_cast<int64_t>(values.size());
  if (size == expected || (may_be_empty && size == 0)) return;
  throw std::invalid_argument("reference: " + std::string(name) + " has " + std::to_string(size) +
                              " elements, the shape needs " + std::to_string(expected));
}

void check(const ReferenceProblem& p) {
  if (p.heads <= 0 || p.value_heads % p.heads != 0)
    throw std::invalid_argument("reference: value_heads must be a multiple of heads");
  const int64_t rows = p.batch * p.tokens;
  check_size("q", p.q, rows * p.heads * p.key_dim, false);
  check_size("k", p.k, rows * p.heads * p.key_dim, false);
  check_size("v", p.v, rows * p.value_heads * p.value_dim, false);
  check_size("beta", p.beta, rows * p.value_heads, false);
  check_size("log_decay", p.log_decay, rows * p.value_heads, true);
  check_size("initial_state", p.initial_state,
             p.sequences() * p.value_heads * p.key_dim * p.value_dim, true);
  if (p.cu_seqlens.empty()) return;
  if (p.batch != 1) throw std::invalid_argument("reference: packed sequences need batch = 1");
  if (p.cu_seqlens.front() < 0 || p.cu_seqlens.back() > p.tokens ||
      !std::is_sorted(p.cu_seqlens.begin(), p.cu_seqlens.end()))
    throw std::invalid_argument("reference: cu_seqlens must be non-decreasing within [0, tokens]");
}

double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// Divides a row by a power of two near its largest element; returns it (long_key.h).
double shorten(double* x, int64_t n) {
  double largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::abs(x[i]));
  const double unit = unit_of(largest);
  for (int64_t i = 0; i < n; ++i) x[i] /= unit;
  return unit;
}

// 1 / sqrt(|x|^2 + eps).
double inverse_length(const double* x, int64_t n) {
  const double square = dot(x, x, n);
  if (!is_long(square)) return 1 / std::sqrt(square + kL2NormEps);
  std::vector<double> shorter(x, x + n);
  const double unit = shorten(shorter.data(), n);
  return 1 / std::sqrt(dot(shorter.data(), shorter.data(), n)) / unit;
}

// Rows of length `dim` divided by sqrt(sum of squares + eps).
std::vector<double> l2_normalised(const std::vector<double>& x, int64_t dim) {
  std::vector<double> y(x.size());
  for (size_t row = 0; row < x.size(); row += dim) {
    const double inverse = inverse_length(&x[row], dim);
    for (int64_t i = 0; i < dim; ++i) y[row + i] = x[row + i] * inverse;
  }
  return y;
}

// y = r x with r = (|x|^2 + eps)^{-1/2}: dx = r (dy - y (y . dy)). In place on `grad`. Rows without
// gradient stay zero even if x holds NaN: padding may hold anything.
void l2_normalised_backward(const std::vector<double>& x, int64_t dim, std::vector<double>& grad) {
  for (size_t row = 0; row < x.size(); row += dim) {
    const double* g = &grad[row];
    if (std::all_of(g, g + dim, [](double value) { return value == 0; })) continue;
    const double inverse = inverse_length(&x[row], dim);
    double along = 0;
    for (int64_t i = 0; i < dim; ++i) along += x[row + i] * inverse * g[i];
    for (int64_t i = 0; i < dim; ++i)
      grad[row + i] = inverse * (grad[row + i] - x[row + i] * inverse * along);
  }
}

// The inputs after normalisation, and where the rows of one token lie.
class Recurrence {
 public:
  explicit Recurrence(const ReferenceProblem& problem)
      : p_(problem),
        q_(problem.qk_l2norm ? l2_normalised(problem.q, problem.key_dim) : problem.q),
        k_(problem.qk_l2norm ? l2_normalised(problem.k, problem.key_dim) : problem.k),
        units_(k_.size() / problem.key_dim, 1.0) {
    for (size_t i = 0; i < units_.size(); ++i) {
      double* k = k_.data() + i * p_.key_dim;
      if (is_long_key(p_.rule, dot(k, k, p_.key_dim))) units_[i] = shorten(k, p_.key_dim);
    }
  }

  int64_t state_size() const { return p_.key_dim * p_.value_dim; }
  // First row and one past the last row of sequence n among the B * T rows.
  int64_t begin(int64_t n) const {
    return p_.cu_seqlens.empty() ? n * p_.tokens : p_.cu_seqlens[n];
  }
  int64_t end(int64_t n) const { return begin(n + 1); }
  // Offsets into q/k, v/o and beta of (row, value head).
  int64_t key_offset(int64_t row, int64_t head) const {
    return (row * p_.heads + head / (p_.value_heads / p_.heads)) * p_.key_dim;
  }
  int64_t scalar_offset(int64_t row, int64_t head) const { return row * p_.value_heads + head; }
  int64_t value_offset(int64_t row, int64_t head) const {
    return scalar_offset(row, head) * p_.value_dim;
  }

  std::vector<double> initial_state(int64_t n, int64_t head) const {
    if (p_.initial_state.empty()) return std::vector<double>(state_size(), 0.0);
    const auto first = p_.initial_state.begin() + (n * p_.value_heads + head) * state_size();
    return {first, first + state_size()};
  }

  // S <- e^g (I - e k k^T) S + w k v^T for one token.
  void advance(int64_t row, int64_t head, std::vector<double>& state) const;
  // o = scale * S^T q.
  void read(int64_t row, int64_t head, const std::vector<double>& state, double* o) const;
  // Pulls the gradient of the state after the token back to before it, adding to `out`.
  void retreat(int64_t row, int64_t head, const std::vector<double>& before,
               const std::vector<double>& after, const double* grad_o,
               std::vector<double>& grad_state, ReferenceGradients& out) const;

 private:
  // What the key at an offset of k_ was divided by.
  double unit(int64_t key_offset) const { return units_[key_offset / p_.key_dim]; }
  StepCoefficients<double> coefficients(int64_t row, int64_t head, double lambda) const {
    const int64_t i = scalar_offset(row, head);
    const bool has_decay = !p_.log_decay.empty();
    return key_coefficients(p_.rule, p_.beta[i], lambda, unit(key_offset(row, head)), has_decay,
                            has_decay ? p_.log_decay[i] : 0.0);
  }
  // p = S^T k [V], what the state recalls for the key.
  std::vector<double> recall(const double* k, const std::vector<double>& state) const {
    std::vector<double> result(p_.value_dim, 0.0);
    for (int64_t i = 0; i < p_.key_dim; ++i)
      for (int64_t j = 0; j < p_.value_dim; ++j) result[j] += k[i] * state[i * p_.value_dim + j];
    return result;
  }

  const ReferenceProblem& p_;
  const std::vector<double> q_;
  std::vector<double> k_;      // long keys in their unit
  std::vector<double> units_;  // [rows, H]
};

void Recurrence::advance(int64_t row, int64_t head, std::vector<double>& state) const {
  const double* k = k_.data() + key_offset(row, head);
  const double* v = p_.v.data() + value_offset(row, head);
  const auto step = coefficients(row, head, dot(k, k, p_.key_dim));
  const double decay = std::exp(step.log_gate);
  const std::vector<double> recalled = recall(k, state);
  for (int64_t i = 0; i < p_.key_dim; ++i)
    for (int64_t j = 0; j < p_.value_dim; ++j) {
      double& s = state[i * p_.value_dim + j];
      s = decay * s + k[i] * (step.write * v[j] - decay * step.erase * recalled[j]);
    }
}

void Recurrence::read(int64_t row, int64_t head, const std::vector<double>& state,
                      double* o) const {
  const std::vector<double> recalled = recall(q_.data() + key_offset(row, head), state);
  for (int64_t j = 0; j < p_.value_dim; ++j) o[j] = p_.scale * recalled[j];
}

// With a = e^g, p = S^T k and u = w v - a e p the step is S' = a S + k u^T, o = scale S'^T q.
void Recurrence::retreat(int64_t row, int64_t head, const std::vector<double>& before,
                         const std::vector<double>& after, const double* grad_o,
                         std::vector<double>& grad_state, ReferenceGradients& out) const {
  const int64_t key_dim = p_.key_dim, value_dim = p_.value_dim;
  const int64_t at_key = key_offset(row, head), at_scalar = scalar_offset(row, head);
  const int64_t at_value = value_offset(row, head);
  const double *q = q_.data() + at_key, *k = k_.data() + at_key, *v = p_.v.data() + at_value;
  const double lambda = dot(k, k, key_dim);
  const auto step = coefficients(row, head, lambda);
  const double decay = std::exp(step.log_gate);

  // o: dS' += scale q do^T, dq = scale S' do.
  if (grad_o != nullptr)
    for (int64_t i = 0; i < key_dim; ++i) {
      out.q[at_key + i] += p_.scale * dot(&after[i * value_dim], grad_o, value_dim);
      for (int64_t j = 0; j < value_dim; ++j)
        grad_state[i * value_dim + j] += p_.scale * q[i] * grad_o[j];
    }

  // S': du = dS'^T k, dk = dS' u, da = <dS', S>.
  const std::vector<double> recalled = recall(k, before);
  const std::vector<double> grad_u = recall(k, grad_state);
  std::vector<double> u(value_dim);
  for (int64_t j = 0; j < value_dim; ++j)
    u[j] = step.write * v[j] - decay * step.erase * recalled[j];
  double grad_decay = dot(grad_state.data(), before.data(), state_size());

  // u: dv = w du, dw = du . v, de = -a du . p, da -= e du . p, dp = -a e du.
  const double along = dot(grad_u.data(), recalled.data(), value_dim);
  grad_decay -= step.erase * along;
  for (int64_t j = 0; j < value_dim; ++j) out.v[at_value + j] += step.write * grad_u[j];
  const double write_gradient = dot(grad_u.data(), v, value_dim);

  // The scalars: dg = a da, then the step rule's own chain rule.
  const bool has_decay = !p_.log_decay.empty();
  const auto scalars =
      key_coefficients_backward<double>(p_.rule, p_.beta[at_scalar], lambda, unit(at_key),
                                        has_decay, has_decay ? p_.log_decay[at_scalar] : 0.0,
                                        {decay * grad_decay, -decay * along, write_gradient});
  out.beta[at_scalar] += scalars.beta;
  out.log_decay[at_scalar] += scalars.log_decay;

  // p: dk += S dp, dS = a dS' + k dp^T; lambda: dk += 2 k dlambda.
  const double erased = -decay * step.erase;
  for (int64_t i = 0; i < key_dim; ++i) {
    double* row_grad = &grad_state[i * value_dim];
    out.k[at_key + i] += (dot(row_grad, u.data(), value_dim) +
                          erased * dot(&before[i * value_dim], grad_u.data(), value_dim) +
                          2 * k[i] * scalars.lambda) /
                         unit(at_key);
    for (int64_t j = 0; j < value_dim; ++j)
      row_grad[j] = decay * row_grad[j] + k[i] * erased * grad_u[j];
  }
}

// Backward over one sequence and head. `grad_state` enters as the gradient of the final state and
// leaves as that of the initial state.
void backward_sequence(const Recurrence& recurrence, int64_t n, int64_t head,
                       const std::vector<double>& grad_o, std::vector<double>& grad_state,
                       ReferenceGradients& out) {
  const int64_t begin = recurrence.begin(n), end = recurrence.end(n);
  std::vector<std::vector<double>> kept;  // the state before rows begin, begin + 64, ...
  std::vector<double> state = recurrence.initial_state(n, head);
  for (int64_t row = begin; row < end; ++row) {
    if ((row - begin) % kSegment == 0) kept.push_back(state);
    recurrence.advance(row, head, state);
  }
  for (int64_t segment = static_cast<int64_t>(kept.size()) - 1; segment >= 0; --segment) {
    const int64_t first = begin + segment * kSegment, last = std::min(first + kSegment, end);
    std::vector<std::vector<double>> states{kept[segment]};
    for (int64_t row = first; row < last; ++row) {
      states.push_back(states.back());
      recurrence.advance(row, head, states.back());
    }
    for (int64_t row = last - 1; row >= first; --row) {
      const double* grad =
          grad_o.empty() ? nullptr : grad_o.data() + recurrence.value_offset(row, head);
      recurrence.retreat(row, head, states[row - first], states[row - first + 1], grad, grad_state,
                         out);
    }
  }
}

}  // namespace

ReferenceResult reference_forward(const ReferenceProblem& problem) {
  check(problem);
  const Recurrence recurrence(problem);
  ReferenceResult result;
  result.o.assign(problem.v.size(), 0.0);
  for (int64_t n = 0; n < problem.sequences(); ++n)
    for (int64_t head = 0; head < problem.value_heads; ++head) {
      std::vector<double> state = recurrence.initial_state(n, head);
      for (int64_t row = recurrence.begin(n); row < recurrence.end(n); ++row) {
        recurrence.advance(row, head, state);
        recurrence.read(row, head, state, result.o.data() + recurrence.value_offset(row, head));
      }
      result.final_state.insert(result.final_state.end(), state.begin(), state.end());
    }
  return result;
}

ReferenceGradients reference_backward(const ReferenceProblem& problem,
                                      const std::vector<double>& grad_o,
                                      const std::vector<double>& grad_final_state) {
  check(problem);
  const Recurrence recurrence(problem);
  const int64_t states = problem.sequences() * problem.value_heads;
  check_size("grad_o", grad_o, static_cast<int64_t>(problem.v.size()), true);
  check_size("grad_final_state", grad_final_state, states * recurrence.state_size(), true);

  ReferenceGradients out;
  out.q.assign(problem.q.size(), 0.0);
  out.k.assign(problem.k.size(), 0.0);
  out.v.assign(problem.v.size(), 0.0);
  out.beta.assign(problem.beta.size(), 0.0);
  out.log_decay.assign(problem.beta.size(), 0.0);
  for (int64_t n = 0; n < problem.sequences(); ++n)
    for (int64_t head = 0; head < problem.value_heads; ++head) {
      std::vector<double> grad_state(recurrence.state_size(), 0.0);
      if (!grad_final_state.empty())
        std::copy_n(
            grad_final_state.begin() + (n * problem.value_heads + head) * recurrence.state_size(),
            recurrence.state_size(), grad_state.begin());
      backward_sequence(recurrence, n, head, grad_o, grad_state, out);
      out.initial_state.insert(out.initial_state.end(), grad_state.begin(), grad_state.end());
    }
  if (problem.qk_l2norm) {
    l2_normalised_backward(problem.q, problem.key_dim, out.q);
    l2_normalised_backward(problem.k, problem.key_dim, out.k);
  }
  return out;
}

}  // namespace efla
