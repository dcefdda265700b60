// Rows of the tiles of K and Q: zeroed, squared, and divided by a power of two where their square
// overflows (flow/long_key.h).
#pragma once

#include "efla/flow/long_key.h"
#include "efla/kernels/cuda/sm90/chunk.cuh"

namespace efla::cuda::sm90 {

// Zeroes row `row` of the tiles of one operand, 64 columns each.
__device__ __forceinline__ void zero_row(unsigned char* tiles, int count, int row) {
#pragma unroll 1
  for (int i = 0; i < count * 8; ++i) {
    *reinterpret_cast<uint4*>(tiles + i / 8 * (kC * 128) + row * 128 + i % 8 * 16) =
        make_uint4(0, 0, 0, 0);
  }
}

// sum of the squares of 8 elements of row `row` of the tiles, from column 8 i on.
template <typename T>
__device__ __forceinline__ float square_of_piece(const unsigned char* tiles, int row, int i) {
  const uint4 piece = *reinterpret_cast<const uint4*>(tiles + i / 8 * (kC * 128) + row * 128 +
                                                      ((i % 8) ^ (row % 8)) * 16);
  const T* x = reinterpret_cast<const T*>(&piece);
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < 8; ++j) sum += static_cast<float>(x[j]) * static_cast<float>(x[j]);
  return sum;
}

// Whether a row of K or Q with that square may be long (long_key.h). Half has no such rows.
template <typename T>
__device__ __forceinline__ bool may_be_long(float square) {
  return kIsBfloat16<T> && square > 0x1p53f;
}

// Whether rows are shortened at all.
__device__ __forceinline__ bool shortens_rows(const ChunkArgs& a) {
  return a.qk_l2norm || is_long_key(a.rule, HUGE_VALF);
}

// Divides row `row` of the tiles by a power of two, which it returns: 1 but for long rows, by their
// largest element, so that all who ask find the same. A row with an infinite element becomes NaN.
template <typename T>
__device__ __forceinline__ float shorten_row(unsigned char* tiles, int count, int row) {
  const auto piece = [&](int i) {
    return reinterpret_cast<uint4*>(tiles + i / 8 * (kC * 128) + row * 128 + i % 8 * 16);
  };
  float largest = 0.f;
#pragma unroll 1
  for (int i = 0; i < count * 8; ++i) {
    const uint4 bits = *piece(i);
    const T* x = reinterpret_cast<const T*>(&bits);
    for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(static_cast<float>(x[j])));
  }
  if (!(largest > 0x1p27f)) return 1.f;
  const float unit = unit_of(largest), factor = largest <= FLT_MAX ? 1.f / unit : NAN;
#pragma unroll 1
  for (int i = 0; i < count * 8; ++i) {
    uint4 bits = *piece(i);
    T* x = reinterpret_cast<T*>(&bits);
    for (int j = 0; j < 8; ++j) x[j] = T(static_cast<float>(x[j]) * factor);
    *piece(i) = bits;
  }
  fence_async_proxy();
  return unit;
}

}  // namespace efla::cuda::sm90
