// One chunk of one value head: rows of q and k in the arithmetic type, the scalars of the step
// rule, decay factors and the two triangular matrices (docs/mathematics.md, "Chunkwise form"):
//
//   D_ti = exp(G_t - G_i) ,   P = scale tril(D o Q K^T) ,   L = diag(e) strictLower(D o K K^T)
//
// with G the running sum of the log-gates inside the chunk. D comes from differences before exp,
// never from a quotient of exponentials. Compiled once per instruction set: include inside a
// foreach_target.h translation unit.

#if defined(EFLA_KERNELS_CPU_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_KERNELS_CPU_CHUNK_INL_H_
#undef EFLA_KERNELS_CPU_CHUNK_INL_H_
#else
#define EFLA_KERNELS_CPU_CHUNK_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "efla/flow/step_rule.h"
#include "efla/kernels/cpu/chunk_layout.h"
#include "efla/kernels/cpu/gemm-inl.h"
#include "efla/kernels/cpu/step-inl.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

/// y [n] = factor * x [n]; n a multiple of the vector length.
template <class D, typename A = hn::TFromD<D>>
HWY_INLINE void scaled_copy(D d, A factor, const A* HWY_RESTRICT x, int64_t n, A* HWY_RESTRICT y) {
  const auto f = hn::Set(d, factor);
  const int64_t lanes = hn::Lanes(d);
  for (int64_t i = 0; i < n; i += lanes) hn::Store(hn::Mul(f, hn::Load(d, x + i)), d, y + i);
}

/// y [padded n] = factor * x [n], converted; the padding of y becomes zero.
template <class D, typename S, typename A = hn::TFromD<D>>
HWY_INLINE void load_row(D d, A factor, const S* HWY_RESTRICT x, int64_t n, A* HWY_RESTRICT y) {
  const auto f = hn::Set(d, factor);
  const int64_t lanes = hn::Lanes(d);
  for (int64_t i = 0; i < n; i += lanes)
    hn::Store(hn::Mul(f, load_some(d, x + i, HWY_MIN(lanes, n - i))), d, y + i);
}

/// y [n] = factor * x [n], converted to the storage type.
template <class D, typename S, typename A = hn::TFromD<D>>
HWY_INLINE void store_row(D d, A factor, const A* HWY_RESTRICT x, int64_t n, S* HWY_RESTRICT y) {
  const auto f = hn::Set(d, factor);
  const int64_t lanes = hn::Lanes(d);
  for (int64_t i = 0; i < n; i += lanes)
    store_some(d, hn::Mul(f, hn::Load(d, x + i)), y + i, HWY_MIN(lanes, n - i));
}

template <typename S>
class Chunk {
 public:
  using A = Arithmetic<S>;
  using D = hn::ScalableTag<A>;
  static_assert(hn::MaxLanes(D()) <= kPad);

  explicit Chunk(const Problem& p)
      : problem_(p),
        key_dim_(p.shape.key_dim),
        stride_(padded(p.shape.key_dim)),
        has_decay_(p.log_decay.data != nullptr),
        memory_(kChunk * (5 * stride_ + key_dim_ + 4 * kChunk)) {
    A* next = memory_.get();
    const auto take = [&](int64_t size) { return std::exchange(next, next + size); };
    rows_ = take(2 * kChunk * stride_);
    state_rows_ = take(2 * kChunk * stride_);
    tail_keys_ = take(kChunk * stride_);
    keys_transposed_ = take(kChunk * key_dim_);
    decay_ = take(kChunk * kChunk);
    p_ = take(kChunk * kChunk);
    key_products_ = take(kChunk * kChunk);
    minus_l_ = take(kChunk * kChunk);
    for (int64_t t = 0; t < kChunk; ++t) std::fill_n(decay_ + t * kChunk, t + 1, A(1));
  }

  /// Tokens [first, first + n) of batch row `row` for value head `head`, n <= kChunk. Without
  /// `queries` only what the state update needs is made: q() and p() are then undefined.
  void load(int64_t row, int64_t first, int64_t n, int64_t head, bool queries) {
    const D d;
    const Shape& s = problem_.shape;
    n_ = n;
    const int64_t key_head = head / (s.value_heads / s.heads);
    double gate = 0;
    for (int64_t t = 0; t < n; ++t) {
      const int64_t token = first + t;
      if (queries)
        load_key_row(d, at<S>(problem_.q, row, token, key_head), key_dim_, problem_.qk_l2norm, A(1),
                     rows_ + t * stride_);
      A* k = rows_ + (n + t) * stride_;
      const KeyLength<A> length =
          load_key(d, problem_.rule, at<S>(problem_.k, row, token, key_head), key_dim_,
                   problem_.qk_l2norm, k);
      coefficients_[t] = key_coefficients(
          problem_.rule, *at<A>(problem_.beta, row, token, head), length.lambda, length.unit,
          has_decay_, has_decay_ ? *at<A>(problem_.log_decay, row, token, head) : A(0));
      // In double and bounded: a strong decay early in the chunk must not blur the later
      // differences, however strong. NaN fails the comparison and stays.
      const double log_gate = coefficients_[t].log_gate;
      gates_[t] = gate += log_gate < kZero ? kZero : log_gate;
    }
    for (int64_t t = 0; t < n; ++t) {
      head_factor_[t] = has_decay_ ? std::exp(static_cast<A>(gates_[t])) : A(1);
      tail_factor_[t] = has_decay_ ? std::exp(static_cast<A>(gate - gates_[t])) : A(1);
    }
    scale_rows(queries);
    make_triangles(queries);
  }

  int64_t size() const { return n_; }
  int64_t stride() const { return stride_; }  // of rows of K elements
  const StepCoefficients<A>& coefficients(int64_t t) const { return coefficients_[t]; }  // of k()
  A head_factor(int64_t t) const { return head_factor_[t]; }                             // exp(G_t)
  A tail_factor(int64_t t) const { return tail_factor_[t]; }  // exp(G_C - G_t)
  A decay() const { return head_factor_[n_ - 1]; }            // exp(G_C)

  const A* q() const { return rows_; }                 // [n, K]
  const A* k() const { return rows_ + n_ * stride_; }  // [n, K], long keys in their unit
  /// Rows that meet the state: [scale exp(G) q ; -e exp(G) k], [2n, K].
  const A* state_rows() const { return state_rows_; }
  const A* minus_erase_rows() const { return state_rows_ + n_ * stride_; }
  /// exp(G_C - G) k, [n, K].
  const A* tail_keys() const { return has_decay_ ? tail_keys_ : k(); }

  // [n, n], row stride kChunk; zero where the comment's bound on i does not hold.
  const A* decay_matrix() const { return decay_; }         // D, i <= t
  const A* p() const { return p_; }                        // P, i <= t
  const A* key_products() const { return key_products_; }  // D o K K^T, i < t
  const A* minus_l() const { return minus_l_; }            // -L, i < t

 private:
  static constexpr double kZero = -2000;  // exp of it is zero in float and double

  void scale_rows(bool queries) {
    const D d;
    for (int64_t t = 0; t < n_; ++t) {
      if (queries)
        scaled_copy(d, static_cast<A>(problem_.scale) * head_factor_[t], q() + t * stride_, stride_,
                    state_rows_ + t * stride_);
      const A* key = k() + t * stride_;
      scaled_copy(d, -coefficients_[t].erase * head_factor_[t], key, stride_,
                  state_rows_ + (n_ + t) * stride_);
      if (has_decay_) scaled_copy(d, tail_factor_[t], key, stride_, tail_keys_ + t * stride_);
    }
  }

  void make_triangles(bool queries) {
    const D d;
    const int64_t lanes = hn::Lanes(d);
    transpose(n_, key_dim_, k(), stride_, keys_transposed_, kChunk);
    gemm(d, Part::kLowerResult, n_, n_, key_dim_, rows_of(k(), stride_), keys_transposed_, kChunk,
         key_products_, kChunk, A(0));
    if (queries)
      gemm(d, Part::kLowerResult, n_, n_, key_dim_, rows_of(q(), stride_), keys_transposed_, kChunk,
           p_, kChunk, A(0));
    const auto scale = hn::Set(d, static_cast<A>(problem_.scale));
    for (int64_t t = 0; t < n_; ++t) {
      const int64_t row = t * kChunk;
      if (has_decay_) make_decay_row(t);
      const auto minus_erase = hn::Set(d, -coefficients_[t].erase);
      for (int64_t i = row; i < row + kChunk; i += lanes) {
        const auto factor = hn::Load(d, decay_ + i);
        const auto outside = hn::Eq(factor, hn::Zero(d));
        const auto kk =
            hn::IfThenZeroElse(outside, hn::Mul(factor, hn::Load(d, key_products_ + i)));
        hn::Store(kk, d, key_products_ + i);
        hn::Store(hn::Mul(minus_erase, kk), d, minus_l_ + i);
        if (!queries) continue;
        const auto qk = hn::Mul(hn::Mul(scale, factor), hn::Load(d, p_ + i));
        hn::Store(hn::IfThenZeroElse(outside, qk), d, p_ + i);
      }
      key_products_[row + t] = minus_l_[row + t] = A(0);
    }
  }

  void make_decay_row(int64_t t) {
    const D d;
    const int64_t lanes = hn::Lanes(d);
    A* row = decay_ + t * kChunk;
    for (int64_t i = 0; i <= t; ++i)
      row[i] = static_cast<A>(std::max(gates_[t] - gates_[i], kZero));
    std::fill(row + t + 1, row + kChunk, static_cast<A>(kZero));
    for (int64_t i = 0; i < kChunk; i += lanes)
      hn::Store(hn::Exp(d, hn::Load(d, row + i)), d, row + i);
  }

  const Problem& problem_;
  const int64_t key_dim_;
  const int64_t stride_;
  const bool has_decay_;
  int64_t n_ = 0;
  Scratch<A> memory_;
  A *rows_, *state_rows_, *tail_keys_, *keys_transposed_;
  A *decay_, *p_, *key_products_, *minus_l_;
  StepCoefficients<A> coefficients_[kChunk];
  double gates_[kChunk];  // G
  A head_factor_[kChunk], tail_factor_[kChunk];
};

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
