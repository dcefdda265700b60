// Vector loads and stores between storage types and the arithmetic type, and the activations that
// several kernels share. Compiled once per instruction set: include inside a foreach_target.h
// translation unit, after targets.h. `d` is always a tag of the arithmetic type.

// Include guard per target, as Highway's own -inl.h files have it.
#if defined(EFLA_KERNELS_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_KERNELS_CPU_SIMD_INL_H_
#undef EFLA_KERNELS_CPU_SIMD_INL_H_
#else
#define EFLA_KERNELS_CPU_SIMD_INL_H_
#endif

#include <cstddef>

#include "efla/kernels/cpu/storage.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D>
using Vector = hn::Vec<D>;

// ---- whole vectors ------------------------------------------------------------------------------

template <class D>
HWY_INLINE Vector<D> load(D d, const hn::TFromD<D>* p) {
  return hn::LoadU(d, p);
}
template <class D>
HWY_INLINE Vector<D> load(D d, const BFloat16* p) {
  return hn::PromoteTo(d, hn::LoadU(hn::Rebind<hwy::bfloat16_t, D>(), p));
}

template <class D>
HWY_INLINE void store(D d, Vector<D> v, hn::TFromD<D>* p) {
  hn::StoreU(v, d, p);
}
/// Rounds to nearest even (Highway's own demotion truncates); NaN stays NaN.
template <class D>
HWY_INLINE void store(D d, Vector<D> v, BFloat16* p) {
  const hn::Rebind<uint32_t, D> du;
  const auto bits = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFF)));
  const auto quiet_nan = hn::BitCast(d, hn::Set(du, 0x7FC00000));
  const auto result = hn::IfThenElse(hn::IsNaN(v), quiet_nan, hn::BitCast(d, rounded));
  const hn::Rebind<hwy::bfloat16_t, D> d16;
  hn::StoreU(hn::DemoteTo(d16, result), d16, p);
}

// ---- the first n < Lanes(d) elements; the rest reads as zero and is not written ----------------

template <class D, typename S>
HWY_INLINE Vector<D> load_n(D d, const S* p, size_t n) {
  HWY_ALIGN S buffer[hn::MaxLanes(d)] = {};
  for (size_t i = 0; i < n; ++i) buffer[i] = p[i];
  return load(d, buffer);
}

template <class D, typename S>
HWY_INLINE void store_n(D d, Vector<D> v, S* p, size_t n) {
  HWY_ALIGN S buffer[hn::MaxLanes(d)];
  store(d, v, buffer);
  for (size_t i = 0; i < n; ++i) p[i] = buffer[i];
}

// ---- loops over any length ---------------------------------------------------------------------

/// Stands for n == Lanes(d), known when compiling.
struct Whole {};

template <class D, typename S>
HWY_INLINE Vector<D> load_some(D d, const S* p, Whole) {
  return load(d, p);
}
template <class D, typename S>
HWY_INLINE Vector<D> load_some(D d, const S* p, size_t n) {
  return HWY_LIKELY(n == hn::Lanes(d)) ? load(d, p) : load_n(d, p, n);
}
template <class D, typename S>
HWY_INLINE void store_some(D d, Vector<D> v, S* p, Whole) {
  store(d, v, p);
}
template <class D, typename S>
HWY_INLINE void store_some(D d, Vector<D> v, S* p, size_t n) {
  if (HWY_LIKELY(n == hn::Lanes(d))) {
    store(d, v, p);
  } else {
    store_n(d, v, p, n);
  }
}

/// body(i, n) for every vector of [0, count): n is Whole{}, for the last few elements their number.
template <class D, typename Body>
HWY_INLINE void for_vectors(D d, int64_t count, const Body& body) {
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) body(i, Whole{});
  if (i < count) body(i, static_cast<size_t>(count - i));
}

// ---- activations --------------------------------------------------------------------------------

/// e^x for |x| <= 86, relative error below 3e-7: a third of the work of Highway's general Exp.
template <class D, hwy::EnableIf<sizeof(hn::TFromD<D>) == 4>* = nullptr>
HWY_INLINE Vector<D> exp_bounded(D d, Vector<D> x) {
  const hn::RebindToSigned<D> di;
  // x = n ln 2 + r, |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to an integer and leaves n in the low
  // bits; n times the first part of ln 2 is exact, with or without fused multiply-add.
  const auto magic = hn::Set(d, 12582912.0f);
  const auto shifted = hn::MulAdd(x, hn::Set(d, 1.44269504f), magic);
  const auto n = hn::Sub(shifted, magic);
  auto r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  // e^r: minimax polynomial of degree 5, error 9.2e-8.
  auto p = hn::MulAdd(r, hn::Set(d, 8.29027221e-3f), hn::Set(d, 4.18981612e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.66676387e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.99991477e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 9.99999702e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(di, shifted));
  return hn::BitCast(d, hn::Add(hn::BitCast(di, p), exponent));
}
template <class D, hwy::EnableIf<sizeof(hn::TFromD<D>) == 8>* = nullptr>
HWY_INLINE Vector<D> exp_bounded(D d, Vector<D> x) {
  return hn::Exp(d, x);
}

/// 1 / (1 + e^-x), relative error below 1e-6 (1e-14 in double) for |x| <= 86 (700); 0 below, so
/// that x * sigmoid(x) vanishes for every finite x there, and 1 to that error above. NaN gives some
/// number in [0, 1]: x * sigmoid(x) is NaN nevertheless.
template <class D>
HWY_INLINE Vector<D> sigmoid(D d, Vector<D> x) {
  using T = hn::TFromD<D>;
  const auto limit = hn::Set(d, sizeof(T) == 4 ? T(86) : T(700));
  const auto bounded = hn::Max(hn::Min(hn::Neg(x), limit), hn::Neg(limit));
  const auto one = hn::Set(d, T(1));
  const auto value = hn::Div(one, hn::Add(one, exp_bounded(d, bounded)));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Neg(limit)), value);
}

/// d/dx of x sigmoid(x), given s = sigmoid(x).
template <class D>
HWY_INLINE Vector<D> silu_derivative(D d, Vector<D> x, Vector<D> s) {
  const auto one = hn::Set(d, hn::TFromD<D>(1));
  return hn::Mul(s, hn::MulAdd(x, hn::Sub(one, s), one));
}

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
