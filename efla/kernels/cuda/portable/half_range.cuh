// Operands in half whatever their size: scaled by a power of two, which changes no digit, so that
// the largest element nearly fills half's range, and the product is scaled back in float. What lies
// more than 2^29 below the largest loses digits, where unscaled half loses them below 6e-5: a gate
// of e^-15, or u = 1e-6 of a key with |k| = 1000.
#pragma once

#include <type_traits>

#include "efla/kernels/cuda/portable/mma.cuh"

namespace efla::cuda {

// The type of A_hat and P_hat and of what they multiply. Half has three bits more than bfloat16,
// and where keys (nearly) repeat, these products are what decides the accuracy. With normalised
// keys |A_hat| stays near 1 unless the rule's own steps expand; P_hat's rows are bounded by scale
// |q|.
template <typename T>
using Square = std::conditional_t<sizeof(T) == 2, __half, float>;

// Powers of two, up * down = 1.
struct Range {
  float up = 1.f, down = 1.f;
};

inline constexpr int kMaxPower = 126;  // `down` stays a normal number

// Brings a number >= 0, given by its bits, to [2^14, 2^15).
__device__ __forceinline__ Range range_of_bits(uint32_t bits, int max_power = kMaxPower) {
  const int exponent = bits >> 23 & 0xff;
  const int power = min(127 + 14 - exponent, max_power);
  return {__int_as_float((127 + power) << 23), __int_as_float((127 - power) << 23)};
}

// Of a bound that the caller has. The gate that multiplies Q S carries `up` too: it stays finite.
template <typename S>
__device__ __forceinline__ Range range_of(float bound) {
  if constexpr (!std::is_same_v<S, __half>) return {};
  return range_of_bits(__float_as_uint(bound), 64);
}

// The largest element that the lanes of a warp hold, as bits.
template <int kTiles>
__device__ __forceinline__ uint32_t most_of(const float (&x)[kTiles][4]) {
  float most = 0.f;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) most = fmaxf(most, fabsf(x[n][j]));
  }
  return __reduce_max_sync(0xffffffffu, __float_as_uint(most));
}

template <typename S, int kTiles>
__device__ __forceinline__ Range range_of(const float (&x)[kTiles][4]) {
  if constexpr (!std::is_same_v<S, __half>) return {};
  return range_of_bits(most_of(x));
}

// The same for a product that is added to c, which is scaled too and stays finite. (Where that
// limits `up`, x is below 2^-86 of c.)
template <typename S, int kTiles, int kSums>
__device__ __forceinline__ Range range_of(const float (&x)[kTiles][4], const float (&c)[kSums][4]) {
  if constexpr (!std::is_same_v<S, __half>) return {};
  const int size = static_cast<int>(most_of(c) >> 23) - 127;
  return range_of_bits(most_of(x), min(100 - size, kMaxPower));
}

template <int kTiles>
__device__ __forceinline__ void multiply_by(float (&c)[kTiles][4], float x) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) c[n][j] *= x;
  }
}

// Two C tiles side by side as an A, scaled.
template <typename S>
__device__ __forceinline__ AFragment<S> as_a(const CFragment& left, const CFragment& right,
                                             float up) {
  if constexpr (std::is_same_v<S, __half>) {
    return {{pack<S>(up * left[0], up * left[1]), pack<S>(up * left[2], up * left[3]),
             pack<S>(up * right[0], up * right[1]), pack<S>(up * right[2], up * right[3])}};
  } else {
    return as_a<S>(left, right);
  }
}

}  // namespace efla::cuda
