// Storage types of tensors and the arithmetic done on them, one element at a time; the vector
// counterpart is simd-inl.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "efla/kernels/params.h"
#include "hwy/base.h"

namespace efla::cpu {

using BFloat16 = hwy::bfloat16_t;

/// The type in which values stored as S are computed: double for double, float otherwise.
template <typename S>
struct ArithmeticOf {
  using type = float;
};
template <>
struct ArithmeticOf<double> {
  using type = double;
};
template <typename S>
using Arithmetic = ArithmeticOf<S>::type;

inline float to_arithmetic(float x) { return x; }
inline double to_arithmetic(double x) { return x; }
inline float to_arithmetic(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}

/// Rounds to nearest even, as torch does; NaN stays NaN.
template <typename S>
S from_arithmetic(Arithmetic<S> x) {
  return x;
}
template <>
inline BFloat16 from_arithmetic<BFloat16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  BFloat16 out;
  out.bits =
      x != x ? uint16_t{0x7FC0} : static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  return out;
}

/// Where row (b, t, h) of a view begins.
template <typename S>
const S* at(const View& v, int64_t b, int64_t t, int64_t h) {
  return static_cast<const S*>(v.data) + b * v.batch + t * v.token + h * v.head;
}
template <typename S>
S* at(const MutableView& v, int64_t b, int64_t t, int64_t h) {
  return static_cast<S*>(v.data) + b * v.batch + t * v.token + h * v.head;
}

/// Calls f(S{}) with the storage type of `dtype`. Ends the program on kFloat16, which has no CPU
/// kernels: callers widen it or refuse it.
template <typename F>
void dispatch_storage(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat64:
      f(double{});
      break;
    case DType::kBFloat16:
      f(BFloat16{});
      break;
    case DType::kFloat32:
      f(float{});
      break;
    case DType::kFloat16:
      HWY_ABORT("EFLA's CPU kernels have no float16 form; convert the tensors to float32");
  }
}

}  // namespace efla::cpu
