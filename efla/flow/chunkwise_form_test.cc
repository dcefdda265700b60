// docs/mathematics.md, "Chunkwise form", transcribed with small dense matrices and compared with
// the sequential reference: the formulas that the kernels implement, free of blocking and
// vectorisation.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "efla/flow/reference.h"
#include "efla/flow/test_support.h"

namespace efla {
namespace {

using namespace efla::testing;  // NOLINT(google-build-using-namespace): test helpers

// Row t of `m` times scale[t].
Matrix scale_rows(const std::vector<double>& scale, Matrix m) {
  for (int64_t i = 0; i < m.rows; ++i)
    for (int64_t j = 0; j < m.cols; ++j) m(i, j) *= scale[i];
  return m;
}
Matrix lower(Matrix m, bool with_diagonal) {
  for (int64_t i = 0; i < m.rows; ++i)
    for (int64_t j = with_diagonal ? i + 1 : i; j < m.cols; ++j) m(i, j) = 0;
  return m;
}
std::vector<double> row_sums(const Matrix& m) {
  std::vector<double> sums(m.rows, 0.0);
  for (int64_t i = 0; i < m.rows; ++i)
    for (int64_t j = 0; j < m.cols; ++j) sums[i] += m(i, j);
  return sums;
}
// (I + L) X = R for strictly lower L, and its transpose: forward and backward substitution.
Matrix solve_lower(const Matrix& l, Matrix r) {
  for (int64_t t = 0; t < r.rows; ++t)
    for (int64_t i = 0; i < t; ++i)
      for (int64_t j = 0; j < r.cols; ++j) r(t, j) -= l(t, i) * r(i, j);
  return r;
}
Matrix solve_upper(const Matrix& l, Matrix r) {
  for (int64_t t = r.rows - 1; t >= 0; --t)
    for (int64_t i = t + 1; i < r.rows; ++i)
      for (int64_t j = 0; j < r.cols; ++j) r(t, j) -= l(i, t) * r(i, j);
  return r;
}

// One chunk of one head: its inputs and what forward computes from them.
struct Chunk {
  const ReferenceProblem& p;
  int64_t first, count;
  Matrix q, k, v, s0;
  std::vector<double> lambda, erase, write, gamma_log, gamma, erase_gamma, tail;
  Matrix d, kk, l, qk, u, probabilities, k_tail;

  Chunk(const ReferenceProblem& problem, int64_t begin, int64_t size, const Matrix& state)
      : p(problem),
        first(begin),
        count(size),
        q(size, problem.key_dim, &problem.q[begin * problem.key_dim]),
        k(size, problem.key_dim, &problem.k[begin * problem.key_dim]),
        v(size, problem.value_dim, &problem.v[begin * problem.value_dim]),
        s0(state),
        d(size, size),
        kk(k * k.transposed()),
        l(size, size),
        qk(q * k.transposed()),
        u(size, problem.value_dim),
        probabilities(size, size),
        k_tail(k) {
    double cumulative = 0;
    for (int64_t t = 0; t < count; ++t) {
      lambda.push_back(kk(t, t));
      const auto c =
          step_coefficients<double>(p.rule, p.beta[first + t], lambda[t], decay(), log_decay(t));
      cumulative += c.log_gate;
      erase.push_back(c.erase);
      write.push_back(c.write);
      gamma_log.push_back(cumulative);
      gamma.push_back(std::exp(cumulative));
      erase_gamma.push_back(c.erase * gamma[t]);
    }
    for (int64_t t = 0; t < count; ++t) {
      tail.push_back(std::exp(cumulative - gamma_log[t]));
      for (int64_t i = 0; i <= t; ++i) d(t, i) = std::exp(gamma_log[t] - gamma_log[i]);
    }
    l = lower(scale_rows(erase, hadamard(d, kk)), false);
    u = solve_lower(l, scale_rows(write, v) - scale_rows(erase_gamma, k * s0));
    probabilities = p.scale * lower(hadamard(d, qk), true);
    k_tail = scale_rows(tail, k);
  }

  bool decay() const { return !p.log_decay.empty(); }
  double log_decay(int64_t t) const { return decay() ? p.log_decay[first + t] : 0; }
  Matrix output() const { return p.scale * scale_rows(gamma, q * s0) + probabilities * u; }
  Matrix next_state() const { return gamma.back() * s0 + k_tail.transposed() * u; }

  // Adds this chunk's gradients to `out`; returns dS0.
  Matrix backward(const Matrix& grad_o, const Matrix& grad_next, ReferenceGradients& out) const;
};

Matrix Chunk::backward(const Matrix& grad_o, const Matrix& grad_next,
                       ReferenceGradients& out) const {
  const double s = p.scale;
  // Serial part.
  const Matrix du = probabilities.transposed() * grad_o + k_tail * grad_next;
  const Matrix dr = solve_upper(l, du);
  Matrix ds0 = gamma.back() * grad_next + s * (scale_rows(gamma, q).transposed() * grad_o) -
               scale_rows(erase_gamma, k).transposed() * dr;
  // Parallel part.
  const Matrix dl = lower(-1.0 * (dr * u.transposed()), false);
  const Matrix dp = lower(grad_o * u.transposed(), true);
  const Matrix dv = scale_rows(write, dr);
  const Matrix z = dr * s0.transposed();
  const Matrix b = scale_rows(erase, hadamard(dl, d));
  const Matrix ddp = hadamard(d, dp);
  const Matrix u_next = u * grad_next.transposed();
  const Matrix o_state = grad_o * s0.transposed();
  const Matrix dk = b * k + b.transposed() * k - scale_rows(erase_gamma, z) +
                    s * (ddp.transposed() * q) + scale_rows(tail, u_next);
  const Matrix dq = s * (scale_rows(gamma, o_state) + ddp * k);
  const std::vector<double> zk = row_sums(hadamard(z, k)), oq = row_sums(hadamard(o_state, q));
  const std::vector<double> dlk = row_sums(hadamard(hadamard(dl, d), kk));
  const Matrix bk = hadamard(b, kk), n = s * hadamard(ddp, qk);
  const std::vector<double> x = row_sums(hadamard(k_tail, u_next));
  const std::vector<double> b_rows = row_sums(bk), b_columns = row_sums(bk.transposed());
  const std::vector<double> n_rows = row_sums(n), n_columns = row_sums(n.transposed());

  double carried = gamma.back() * dot(s0.data, grad_next.data);
  for (const double value : x) carried += value;
  for (int64_t t = count - 1; t >= 0; --t) {
    carried += b_rows[t] - b_columns[t] + n_rows[t] - n_columns[t] + s * gamma[t] * oq[t] -
               erase_gamma[t] * zk[t] - x[t];  // reverse cumulative sum of dG is dg
    double dw = 0;
    for (int64_t j = 0; j < v.cols; ++j) dw += dr(t, j) * v(t, j);
    const double de = dlk[t] - gamma[t] * zk[t];
    const auto scalars = step_coefficients_backward<double>(
        p.rule, p.beta[first + t], lambda[t], decay(), log_decay(t), {carried, de, dw});
    out.beta[first + t] = scalars.beta;
    out.log_decay[first + t] = scalars.log_decay;
    for (int64_t i = 0; i < k.cols; ++i) {
      out.k[(first + t) * k.cols + i] = dk(t, i) + 2 * k(t, i) * scalars.lambda;
      out.q[(first + t) * k.cols + i] = dq(t, i);
    }
    for (int64_t j = 0; j < v.cols; ++j) out.v[(first + t) * v.cols + j] = dv(t, j);
  }
  return ds0;
}

TEST(ChunkwiseForm, ForwardAndBackwardEqualTheRecurrence) {
  constexpr int64_t kTokens = 37, kChunk = 16, kKey = 6, kValue = 4;
  for (const Rule rule : kAllRules)
    for (const bool decay : {false, true}) {
      SCOPED_TRACE(std::string(rule_name(rule)) + (decay ? " with decay" : ""));
      ReferenceProblem p = single_head(rule, kTokens, kKey, kValue, 41, decay);
      p.scale = 0.4;
      std::mt19937_64 random(42);
      const auto grad_o = normal(random, kTokens * kValue);
      const auto grad_final = normal(random, kKey * kValue);

      std::vector<Chunk> chunks;
      Matrix state(kKey, kValue, p.initial_state.data());
      std::vector<double> o;
      for (int64_t first = 0; first < kTokens; first += kChunk) {
        chunks.emplace_back(p, first, std::min(kChunk, kTokens - first), state);
        const Matrix out = chunks.back().output();
        o.insert(o.end(), out.data.begin(), out.data.end());
        state = chunks.back().next_state();
      }
      const auto forward = reference_forward(p);
      EXPECT_LT(relative_error(o, forward.o), 1e-12);
      EXPECT_LT(relative_error(state.data, forward.final_state), 1e-12);

      const ReferenceGradients expected = reference_backward(p, grad_o, grad_final);
      ReferenceGradients got = expected;
      for (auto* g : {&got.q, &got.k, &got.v, &got.beta, &got.log_decay})
        std::fill(g->begin(), g->end(), NAN);
      Matrix grad_state(kKey, kValue, grad_final.data());
      for (size_t c = chunks.size(); c-- > 0;) {
        const Matrix go(chunks[c].count, kValue, &grad_o[chunks[c].first * kValue]);
        grad_state = chunks[c].backward(go, grad_state, got);
      }
      EXPECT_LT(relative_error(got.q, expected.q), 1e-12);
      EXPECT_LT(relative_error(got.k, expected.k), 1e-12);
      EXPECT_LT(relative_error(got.v, expected.v), 1e-12);
      EXPECT_LT(relative_error(got.beta, expected.beta), 1e-12);
      EXPECT_LT(norm((column(got.log_decay) - column(expected.log_decay)).data),
                1e-12 * (1 + norm(expected.log_decay)));
      EXPECT_LT(relative_error(grad_state.data, expected.initial_state), 1e-12);
    }
}

}  // namespace
}  // namespace efla
