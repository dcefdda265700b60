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

// ---- the first n < Lanes(d) elements; the rest reads as zero and is not written
// ------------------

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

// ---- n <= Lanes(d): a loop over any length is then one body
// ---------------------------------------

template <class D, typename S>
HWY_INLINE Vector<D> load_some(D d, const S* p, size_t n) {
  return HWY_LIKELY(n == hn::Lanes(d)) ? load(d, p) : load_n(d, p, n);
}
template <class D, typename S>
HWY_INLINE void store_some(D d, Vector<D> v, S* p, size_t n) {
  if (HWY_LIKELY(n == hn::Lanes(d))) {
    store(d, v, p);
  } else {
    store_n(d, v, p, n);
  }
}

// ---- activations
// ---------------------------------------------------------------------------------

/// 1 / (1 + e^-x), relative error about 1e-7 (1e-15 in double) while the result is normal.
template <class D>
HWY_INLINE Vector<D> sigmoid(D d, Vector<D> x) {
  using T = hn::TFromD<D>;
  const T limit = sizeof(T) == 4 ? T(87) : T(700);  // e^limit is finite
  const auto one = hn::Set(d, T(1));
  return hn::Div(one, hn::Add(one, hn::Exp(d, hn::Min(hn::Neg(x), hn::Set(d, limit)))));
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
