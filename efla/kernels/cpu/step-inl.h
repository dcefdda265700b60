// The recurrence over a few tokens for a block of state columns, in registers and L1 (docs/
// mathematics.md, "Step rules"):
//
//   u_t = w_t v_t - (e^{g} e)_t S_{t-1}^T k_t ,   S_t = e^{g} S_{t-1} + k_t u_t^T ,
//   o_t = e^{g} S_{t-1}^T q_t + (k_t . q_t) u_t          (q already scaled)
//
// so that one pass over the old state gives both products and a second one updates it; between two
// tokens the update of one and the products of the next share a pass. Columns of the state do not
// exchange anything. Compiled once per instruction set: include inside a foreach_target.h
// translation unit.

#if defined(EFLA_KERNELS_CPU_STEP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_KERNELS_CPU_STEP_INL_H_
#undef EFLA_KERNELS_CPU_STEP_INL_H_
#else
#define EFLA_KERNELS_CPU_STEP_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "efla/flow/long_key.h"
#include "efla/flow/step_rule.h"
#include "efla/kernels/cpu/simd-inl.h"
#include "efla/kernels/params.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

/// The scalars of one token in the form the loops use.
template <typename A>
struct StepScalars {
  A decay;  // e^g
  A erase;  // e^g e
  A write;  // w
  A qk;     // scale q . k
};

/// A run of tokens of one head; rows in the arithmetic type, `*_stride` elements apart.
template <typename A>
struct StepTokens {
  int64_t count = 0;
  int64_t key_dim = 0;
  const A* q = nullptr;  // [count, key_dim], scaled
  const A* k = nullptr;  // [count, key_dim]
  int64_t key_stride = 0;
  const StepScalars<A>* scalars = nullptr;  // [count]
  const A* v = nullptr;                     // [count, columns]
  A* o = nullptr;                           // [count, columns]; may be v
  int64_t value_stride = 0;
};

/// sum x_i y_i over n elements; the order of the sum depends on n only.
template <class D, typename A = hn::TFromD<D>>
HWY_INLINE A dot(D d, const A* HWY_RESTRICT x, const A* HWY_RESTRICT y, int64_t n) {
  auto sum = hn::Zero(d);
  for_vectors(d, n, [&](int64_t i, auto some) HWY_ATTR {
    sum = hn::MulAdd(load_some(d, x + i, some), load_some(d, y + i, some), sum);
  });
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

/// Divides a row by unit_of() of its largest element, which it returns.
template <typename A>
A shorten(A* x, int64_t n) {
  A largest = A(0);
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::abs(x[i]));
  const A unit = unit_of(largest);
  for (int64_t i = 0; i < n; ++i) x[i] *= A(1) / unit;
  return unit;
}

/// Converts a row of q or k to the arithmetic type, optionally normalised, times `scale`.
template <class D, typename S, typename A = hn::TFromD<D>>
HWY_INLINE void load_key_row(D d, const S* HWY_RESTRICT in, int64_t n, bool l2norm, A scale,
                             A* HWY_RESTRICT out) {
  auto sum = hn::Zero(d);
  for_vectors(d, n, [&](int64_t i, auto some) HWY_ATTR {
    const auto x = load_some(d, in + i, some);
    sum = hn::MulAdd(x, x, sum);
    store_some(d, x, out + i, some);
  });
  if (l2norm) {
    A square = hn::GetLane(hn::SumOfLanes(d, sum));
    if (HWY_LIKELY(!is_long(square))) {
      square += A(1e-6);
    } else {
      shorten(out, n);
      square = dot(d, out, out, n);
    }
    scale *= A(1) / std::sqrt(square);
  }
  if (scale == A(1)) return;
  for (int64_t i = 0; i < n; ++i) out[i] *= scale;
}

/// What the step rule needs of a key that load_key has loaded.
template <typename A>
struct KeyLength {
  A lambda;  // |k|^2 of the row as it is now
  A unit;    // what the row was divided by: 1 but for long keys (long_key.h)
};

/// Converts a key, which becomes shorter if it is too long for the rule.
template <class D, typename S, typename A = hn::TFromD<D>>
HWY_INLINE KeyLength<A> load_key(D d, Rule rule, const S* HWY_RESTRICT in, int64_t n, bool l2norm,
                                 A* HWY_RESTRICT out) {
  load_key_row(d, in, n, l2norm, A(1), out);
  const A lambda = dot(d, out, out, n);
  if (HWY_LIKELY(!is_long_key(rule, lambda))) return {lambda, A(1)};
  const A unit = shorten(out, n);
  return {dot(d, out, out, n), unit};
}

/// The scalars of a token from its scaled query, what load_key gave, and beta, log_decay.
template <class D, typename A = hn::TFromD<D>>
HWY_INLINE StepScalars<A> step_scalars(D d, Rule rule, const A* q, const A* k, KeyLength<A> length,
                                       int64_t key_dim, A beta, bool has_decay, A log_decay) {
  const StepCoefficients<A> c =
      key_coefficients(rule, beta, length.lambda, length.unit, has_decay, log_decay);
  const A decay = c.log_gate == A(0) ? A(1) : std::exp(c.log_gate);
  return {decay, decay * c.erase, c.write, dot(d, q, k, key_dim)};
}

// Passes over the rows of a block of NV vectors of columns. kUpdate applies S <- decay S + k u^T of
// token t; kDots accumulates S^T k and S^T q of the next token (after the update, if any).
template <int NV, bool kUpdate, bool kDecay, bool kDots, class D>
HWY_INLINE void state_pass(D d, hn::TFromD<D>* HWY_RESTRICT state, int64_t stride, int64_t key_dim,
                           const hn::TFromD<D>* HWY_RESTRICT k_update, hn::TFromD<D> decay,
                           const Vector<D>* u, const hn::TFromD<D>* HWY_RESTRICT k_next,
                           const hn::TFromD<D>* HWY_RESTRICT q_next, Vector<D>* sk, Vector<D>* sq) {
  const int64_t lanes = hn::Lanes(d);
  Vector<D> update[NV], dot_k[NV], dot_q[NV];
  const auto decay_v = hn::Set(d, decay);
#pragma GCC unroll 8
  for (int c = 0; c < NV; ++c) {
    if constexpr (kUpdate) update[c] = u[c];
    if constexpr (kDots) dot_k[c] = dot_q[c] = hn::Zero(d);
  }
  for (int64_t i = 0; i < key_dim; ++i) {
    auto* HWY_RESTRICT row = state + i * stride;
#pragma GCC unroll 8
    for (int c = 0; c < NV; ++c) {
      auto s = hn::LoadU(d, row + c * lanes);
      if constexpr (kUpdate) {
        if constexpr (kDecay) s = hn::Mul(s, decay_v);
        s = hn::MulAdd(hn::Set(d, k_update[i]), update[c], s);
        hn::StoreU(s, d, row + c * lanes);
      }
      if constexpr (kDots) {
        dot_k[c] = hn::MulAdd(hn::Set(d, k_next[i]), s, dot_k[c]);
        dot_q[c] = hn::MulAdd(hn::Set(d, q_next[i]), s, dot_q[c]);
      }
    }
  }
  if constexpr (kDots) {
#pragma GCC unroll 8
    for (int c = 0; c < NV; ++c) {
      sk[c] = dot_k[c];
      sq[c] = dot_q[c];
    }
  }
}

/// All tokens for NV vectors of columns starting at `state`; v and o point at the same columns.
template <int NV, class D, typename A = hn::TFromD<D>>
HWY_INLINE void step_columns(D d, const StepTokens<A>& x, const A* v, A* o, A* HWY_RESTRICT state,
                             int64_t stride) {
  const int64_t lanes = hn::Lanes(d);
  Vector<D> sk[NV], sq[NV], u[NV];
  state_pass<NV, false, false, true>(d, state, stride, x.key_dim, nullptr, A(1), nullptr, x.k, x.q,
                                     sk, sq);
  for (int64_t t = 0; t < x.count; ++t) {
    const StepScalars<A>& c = x.scalars[t];
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) {
      const auto value = hn::LoadU(d, v + t * x.value_stride + j * lanes);
      u[j] = hn::NegMulAdd(hn::Set(d, c.erase), sk[j], hn::Mul(hn::Set(d, c.write), value));
      hn::StoreU(hn::MulAdd(hn::Set(d, c.decay), sq[j], hn::Mul(hn::Set(d, c.qk), u[j])), d,
                 o + t * x.value_stride + j * lanes);
    }
    const A* k = x.k + t * x.key_stride;
    const bool last = t + 1 == x.count;
    const A* k_next = k + x.key_stride;
    const A* q_next = x.q + (t + 1) * x.key_stride;
    if (last && c.decay == A(1)) {
      state_pass<NV, true, false, false>(d, state, stride, x.key_dim, k, c.decay, u, nullptr,
                                         nullptr, sk, sq);
    } else if (last) {
      state_pass<NV, true, true, false>(d, state, stride, x.key_dim, k, c.decay, u, nullptr,
                                        nullptr, sk, sq);
    } else {
      state_pass<NV, true, true, true>(d, state, stride, x.key_dim, k, c.decay, u, k_next, q_next,
                                       sk, sq);
    }
  }
}

/// Vectors of columns that the block loop of step_block works on at a time.
inline constexpr int kStepVectors = 4;

/// All tokens for `columns` columns, any number. `state` [key_dim, stride]; columns past the last
/// whole vector go through a padded copy, so that nothing outside the block is touched.
template <class D, typename A = hn::TFromD<D>>
HWY_INLINE void step_block(D d, const StepTokens<A>& x, A* state, int64_t stride, int64_t columns) {
  const int64_t lanes = hn::Lanes(d);
  int64_t j = 0;
  for (; j + kStepVectors * lanes <= columns; j += kStepVectors * lanes)
    step_columns<kStepVectors>(d, x, x.v + j, x.o + j, state + j, stride);
  for (; j + lanes <= columns; j += lanes)
    step_columns<1>(d, x, x.v + j, x.o + j, state + j, stride);
  if (j == columns) return;
  const int64_t rest = columns - j;
  constexpr int64_t kMaxLanes = hn::MaxLanes(d);
  HWY_ALIGN A strip[kMaxHeadDim * kMaxLanes];
  for (int64_t i = 0; i < x.key_dim; ++i)
    for (int64_t c = 0; c < lanes; ++c)
      strip[i * lanes + c] = c < rest ? state[i * stride + j + c] : A(0);
  step_columns<1>(d, x, x.v + j, x.o + j, strip, lanes);
  for (int64_t i = 0; i < x.key_dim; ++i)
    for (int64_t c = 0; c < rest; ++c) state[i * stride + j + c] = strip[i * lanes + c];
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
