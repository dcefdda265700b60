// What a warpgroup needs that holds 64 rows of a transposed state, or of its gradient, [64, K], in
// registers: their columns times scalars, the way to and from memory and to operands, products.
#pragma once

#include "efla/kernels/cuda/sm90/tile_rows.cuh"

namespace efla::cuda::sm90 {

// A pair of per-token scalars, of columns 8 j + 2 t and the next.
__device__ __forceinline__ float2 scalar_pair(const float (&row)[kC], int j) {
  return *reinterpret_cast<const float2*>(&row[8 * j + threadIdx.x % 4 * 2]);
}

// What `row` has for the tokens of an accumulator's columns, and the columns times that.
__device__ __forceinline__ void read_columns(float2 (&x)[8], const float (&row)[kC]) {
#pragma unroll
  for (int n = 0; n < 8; ++n) x[n] = scalar_pair(row, n);
}
__device__ __forceinline__ void scale_columns(float (&d)[32], const float2 (&x)[8]) {
#pragma unroll
  for (int n = 0; n < 16; ++n) d[2 * n] *= x[n / 2].x, d[2 * n + 1] *= x[n / 2].y;
}
__device__ __forceinline__ void scale_columns(float (&d)[32], const float (&row)[kC]) {
  float2 x[8];
  read_columns(x, row);
  scale_columns(d, x);
}

// The A operand of 16 inner elements from two neighbouring column groups of an accumulator.
template <typename T>
__device__ __forceinline__ void pack_step(uint32_t (&a)[4], const float* d) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = pack<T>(d[2 * i], d[2 * i + 1]);
}

// The column of V that a thread's part of a state starts with. Its element 4 n + i is of column
// + i / 2 * 8 and of row 8 n + lane % 4 * 2 + i % 2 of K.
__device__ __forceinline__ int state_column(int column) {
  return column + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
}

// Visits a thread's part of a float state [key_dim, value_dim] in global memory: `visit(element,
// x)`. Sizes are multiples of 8: a warp has its groups of 8 whole or not at all. Without kPadded
// both are kK.
template <int kK, bool kPadded, typename Element, typename Visit>
__device__ __forceinline__ void visit_state(float (&state)[kK / 2], Element* data, int key_dim,
                                            int value_dim, int column, Visit visit) {
  const int v = state_column(column);
  const auto run = [&](int keys, int values) {
    Element* row = data + threadIdx.x % 4 * 2 * values + v;
#pragma unroll
    for (int n = 0; n < kK / 8; ++n, row += 8 * values) {
      if (n * 8 >= keys) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (v + i / 2 * 8 < values) visit(row[i % 2 * values + i / 2 * 8], state[4 * n + i]);
      }
    }
  };
  if (!kPadded || (key_dim == kK && value_dim == kK)) {
    __builtin_assume(v + 8 < kK);
    run(kK, kK);  // without a comparison, at constant addresses
  } else {
    run(key_dim, value_dim);
  }
}
template <int kK, bool kPadded = true>
__device__ __forceinline__ void load_state(float (&state)[kK / 2], const float* data, int key_dim,
                                           int value_dim, int column) {
  visit_state<kK, kPadded>(state, data, key_dim, value_dim, column,
                           [](float y, float& x) { x = y; });
}
template <int kK, bool kPadded = true>
__device__ __forceinline__ void store_state(float (&state)[kK / 2], float* data, int key_dim,
                                            int value_dim, int column) {
  visit_state<kK, kPadded>(state, data, key_dim, value_dim, column,
                           [](float& y, float x) { y = x; });
}

// The same of a state in a workspace, in no order but that of the threads: each has its elements at
// 16 bytes beside its neighbours'. visit(four of them in memory, four in registers).
template <int kK, typename Visit>
__device__ __forceinline__ void visit_part(float (&state)[kK / 2], float* data, int column,
                                           Visit visit) {
  auto* pieces = reinterpret_cast<float4*>(data + column * kK) + threadIdx.x / 32 % 4 * (4 * kK) +
                 threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) visit(pieces[32 * n], &state[4 * n]);
}
__device__ __forceinline__ void load_four(const float4& from, float* x) {
  const float4 y = from;
  x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}
__device__ __forceinline__ void store_four(float4& to, const float* x) {
  to = make_float4(x[0], x[1], x[2], x[3]);
}
template <int kK>
__device__ __forceinline__ void load_part(float (&state)[kK / 2], const float* data, int column) {
  visit_part<kK>(state, const_cast<float*>(data), column, load_four);
}
template <int kK>
__device__ __forceinline__ void store_part(float (&state)[kK / 2], float* data, int column) {
  visit_part<kK>(state, data, column, store_four);
}

// d = S^T K^T (or with q in k's place, S^T Q^T) of one warpgroup, or d less that.
template <typename T, int kK, bool kSubtract = false>
__device__ __forceinline__ void multiply_state(float (&d)[32], const uint32_t (&state)[kK / 16][4],
                                               const void* k) {
  const uint64_t b = describe_rows(k);
#pragma unroll
  for (int i = 0; i < kK / 16; ++i) {
    const uint64_t step = b + i / 4 * (kC * 128 / 16) + i % 4 * 2;
    product<T, kSubtract ? -1 : 1>(d, state[i], step, kSubtract || i > 0);
  }
  commit_products();
}

// v^T, packed, from this lane's rows of its tile.
__device__ __forceinline__ void read_values(uint32_t (&v)[4][4], uint32_t tile) {
#pragma unroll
  for (int i = 0; i < 4; ++i) ldmatrix_x4_transposed(v[i], tile + i * 16 * 128);
}
// The same as floats.
template <typename T>
__device__ __forceinline__ void unpack_values(float (&d)[32], const uint32_t (&v)[4][4]) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    const float2 x = unpack<T>(v[n / 4][n % 4]);
    d[2 * n] = x.x, d[2 * n + 1] = x.y;
  }
}

// Shortens long rows of a chunk's tiles for threads, the block's first, that go on together.
template <typename T, int kTiles, int kThreads, int kBarrier, typename... Tiles>
__device__ __forceinline__ void shorten_rows(Tiles&... tiles) {
  const int row = threadIdx.x;
  if (row < kC) (shorten_row<T>(tiles[0], kTiles, row), ...);
  sync_threads(kBarrier, kThreads);
}

}  // namespace efla::cuda::sm90
