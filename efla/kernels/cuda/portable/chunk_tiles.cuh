// How the portable kernels move tiles: copies of a known number of threads, and 16-byte stores of
// what lies in fragments.
#pragma once

#include "efla/kernels/cuda/portable/chunk_common.cuh"

namespace efla::cuda {

// Whether the rows of a view are whole 16-byte pieces on 16-byte boundaries.
template <typename T, typename AnyView>
__device__ __forceinline__ bool has_vectors(const AnyView& x, int columns) {
  constexpr int kPer = 16 / sizeof(T);
  const auto bits = static_cast<uint64_t>(x.batch | x.token | x.head | columns);
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && bits % kPer == 0;
}

// load_tile() for kThreads threads, those of the block or (of vectors) of a part of it, with a
// column and a step of rows for each thread.
template <int kThreads, int kRows, int kColumns, typename T>
__device__ __forceinline__ void load_tile_by(T* tile, int pitch, const T* source, int64_t stride,
                                             int rows, int columns, bool vector) {
  constexpr int kPer = 16 / sizeof(T), kPieces = kColumns / kPer, kStep = kThreads / kPieces;
  static_assert(kThreads % kPieces == 0);
  if (!vector) {
    load_tile<kRows, kColumns>(tile, pitch, source, stride, rows, columns, false);
    return;
  }
  const int thread = threadIdx.x % kThreads;
  const int r0 = thread / kPieces, c = thread % kPieces * kPer;
  const bool exists = c < columns;
  const T* from = source + r0 * stride + c;
  T* to = tile + r0 * pitch + c;
#pragma unroll
  for (int r = 0; r < kRows; r += kStep) {
    if (kRows % kStep != 0 && r0 + r >= kRows) break;
    const bool valid = exists && r0 + r < rows;
    copy_async_16(to + r * pitch, valid ? from + r * stride : source, valid);
  }
}

// load_tile_by() where there is a number of threads, else load_tile(), which takes fewer registers.
template <int kThreads, int kRows, int kColumns, typename T>
__device__ __forceinline__ void load_part(T* tile, int pitch, const T* source, int64_t stride,
                                          int rows, int columns, bool vector) {
  if constexpr (kThreads > 0) {
    load_tile_by<kThreads, kRows, kColumns>(tile, pitch, source, stride, rows, columns, vector);
  } else {
    load_tile<kRows, kColumns>(tile, pitch, source, stride, rows, columns, vector);
  }
}

// Copies those blocks of 16 of a matrix [kC, kC] that a lower triangle has.
template <int kThreads, int kC, typename T>
__device__ __forceinline__ void load_lower(T* tile, const T* source) {
  constexpr int kPer = 16 / sizeof(T), kPieces = kC / kPer;
  const int threads = kThreads > 0 ? kThreads : blockDim.x;
#pragma unroll
  for (int i = kThreads > 0 ? threadIdx.x % kThreads : threadIdx.x; i < kC * kPieces;
       i += threads) {
    const int r = i / kPieces, c = i % kPieces * kPer;
    if (c / 16 <= r / 16) copy_async_16(tile + r * (kC + kTilePad) + c, source + i * kPer, true);
  }
}

// Two neighbouring elements as floats.
template <typename T>
__device__ __forceinline__ float2 load_two(const T* x) {
  if constexpr (std::is_same_v<T, float>) {
    return *reinterpret_cast<const float2*>(x);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(x));
  } else {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(x));
  }
}

// Transposes the 4 x 4 words that the four lanes of a row of fragments hold: of four neighbouring C
// tiles, packed, lane t gets the whole row of tile t.
__device__ __forceinline__ void turn_quads(uint32_t (&x)[4]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, t % 2 ? x[i] : x[i + 1], 1);
    x[i] = t % 2 ? other : x[i];
    x[i + 1] = t % 2 ? x[i + 1] : other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, t / 2 ? x[i] : x[i + 2], 2);
    x[i] = t / 2 ? other : x[i];
    x[i + 2] = t / 2 ? x[i + 2] : other;
  }
}

// Writes C tiles [16, 8 kTiles] in 16-byte pieces, tile n at column_of(n) if that is below
// `columns`, in rows below `rows`.
template <typename T, int kTiles, typename Column>
__device__ __forceinline__ void store_tiles(T* target, int64_t stride, const float (&x)[kTiles][4],
                                            int rows, int columns, Column column_of) {
  static_assert(sizeof(T) == 2 && kTiles % 4 == 0);
  const int row = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < kTiles; n += 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = pack<T>(x[n + i][2 * half], x[n + i][2 * half + 1]);
      turn_quads(words);
      const int r = row + 8 * half, c = column_of(n + t);
      if (r < rows && c < columns) {
        *reinterpret_cast<uint4*>(target + r * stride + c) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// The same with one tile beside the other.
template <typename T, int kTiles>
__device__ __forceinline__ void store_tiles(T* target, int64_t stride, const float (&x)[kTiles][4],
                                            int rows, int columns) {
  store_tiles(target, stride, x, rows, columns, [](int n) { return 8 * n; });
}

}  // namespace efla::cuda
