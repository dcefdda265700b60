// What the tests of this room share: a small dense matrix, random problems, error measures.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "efla/flow/reference.h"

namespace efla::testing {

/// Dense row-major matrix of doubles; only what the tests need.
struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<double> data;

  Matrix(int64_t r, int64_t c) : rows(r), cols(c), data(r * c, 0.0) {}
  Matrix(int64_t r, int64_t c, const double* values)
      : rows(r), cols(c), data(values, values + r * c) {}
  double& operator()(int64_t i, int64_t j) { return data[i * cols + j]; }
  double operator()(int64_t i, int64_t j) const { return data[i * cols + j]; }
  Matrix transposed() const {
    Matrix m(cols, rows);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j) m(j, i) = (*this)(i, j);
    return m;
  }
};

inline Matrix operator*(const Matrix& a, const Matrix& b) {
  Matrix m(a.rows, b.cols);
  for (int64_t i = 0; i < a.rows; ++i)
    for (int64_t l = 0; l < a.cols; ++l)
      for (int64_t j = 0; j < b.cols; ++j) m(i, j) += a(i, l) * b(l, j);
  return m;
}
inline Matrix operator*(double s, Matrix m) {
  for (double& x : m.data) x *= s;
  return m;
}
inline Matrix operator+(Matrix a, const Matrix& b) {
  for (size_t i = 0; i < a.data.size(); ++i) a.data[i] += b.data[i];
  return a;
}
inline Matrix operator-(const Matrix& a, const Matrix& b) { return a + -1.0 * b; }

/// Elementwise product.
inline Matrix hadamard(Matrix a, const Matrix& b) {
  for (size_t i = 0; i < a.data.size(); ++i) a.data[i] *= b.data[i];
  return a;
}
inline Matrix identity(int64_t n) {
  Matrix m(n, n);
  for (int64_t i = 0; i < n; ++i) m(i, i) = 1;
  return m;
}
inline Matrix column(const std::vector<double>& v) {
  return Matrix(static_cast<int64_t>(v.size()), 1, v.data());
}

inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}
inline double norm(const std::vector<double>& a) { return std::sqrt(dot(a, a)); }

/// |a - b| / |b| in the 2-norm; infinite when sizes differ or a value is not finite.
inline double relative_error(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  double difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference += (a[i] - b[i]) * (a[i] - b[i]);
  const double error = std::sqrt(difference) / (norm(b) + 1e-300);
  return std::isfinite(error) ? error : INFINITY;
}

/// Standard-normal numbers times `scale`.
inline std::vector<double> normal(std::mt19937_64& random, int64_t count, double scale = 1) {
  std::normal_distribution<double> distribution;
  std::vector<double> values(count);
  for (double& x : values) x = scale * distribution(random);
  return values;
}
/// Numbers uniform in [low, high).
inline std::vector<double> uniform(std::mt19937_64& random, int64_t count, double low,
                                   double high) {
  std::uniform_real_distribution<double> distribution(low, high);
  std::vector<double> values(count);
  for (double& x : values) x = distribution(random);
  return values;
}

/// Fills the vectors of a problem whose shape is set: keys of norm around sqrt(K) * 0.7, beta in
/// (0, 1), log_decay in (-2, 0) if wanted.
inline void fill(ReferenceProblem& p, std::mt19937_64& random, bool with_decay,
                 bool with_state = true) {
  const int64_t rows = p.batch * p.tokens;
  p.q = normal(random, rows * p.heads * p.key_dim);
  p.k = normal(random, rows * p.heads * p.key_dim, 0.7);
  p.v = normal(random, rows * p.value_heads * p.value_dim);
  p.beta = uniform(random, rows * p.value_heads, 0, 1);
  if (with_decay) p.log_decay = uniform(random, rows * p.value_heads, -2, 0);
  if (with_state)
    p.initial_state = normal(random, p.sequences() * p.value_heads * p.key_dim * p.value_dim);
}

/// One head, one sequence, filled.
inline ReferenceProblem single_head(Rule rule, int64_t tokens, int64_t key_dim, int64_t value_dim,
                                    uint64_t seed, bool with_decay = false) {
  ReferenceProblem p;
  p.tokens = tokens;
  p.key_dim = key_dim;
  p.value_dim = value_dim;
  p.rule = rule;
  std::mt19937_64 random(seed);
  fill(p, random, with_decay);
  return p;
}

}  // namespace efla::testing
