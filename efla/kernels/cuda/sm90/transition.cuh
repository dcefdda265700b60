// How the transition M of a part of a sequence is kept, for join.cuh: as the sum of two bfloat16,
// to about 2^-17 of each element, in tiles that the tensor cores read as they are.
#pragma once

#include "efla/kernels/cuda/sm90/state_rows.cuh"

namespace efla::cuda::sm90 {

// M^T [kK, kK]: of each row tiles of 64 columns, as tile_offset() has them.
template <int kK>
struct Transition {
  unsigned char head[kK / 64][kK * 128], tail[kK / 64][kK * 128];
};
static_assert(sizeof(Transition<128>) == 128 * 128 * sizeof(float));  // a slot of the workspace

// A pair of floats as pairs of bfloat16 that add up to it.
__device__ __forceinline__ void split(uint32_t& head, uint32_t& tail, float x, float y) {
  head = pack<__nv_bfloat16>(x, y);
  const float2 most = unpack<__nv_bfloat16>(head);
  tail = pack<__nv_bfloat16>(x - most.x, y - most.y);
}
// A operands of 16 inner elements, as pack_step() makes one.
__device__ __forceinline__ void split_step(uint32_t (&head)[4], uint32_t (&tail)[4],
                                           const float* d) {
#pragma unroll
  for (int i = 0; i < 4; ++i) split(head[i], tail[i], d[2 * i], d[2 * i + 1]);
}

// Transposes a matrix of words of which each of four neighbouring lanes has a row.
__device__ __forceinline__ void transpose_words(uint32_t (&x)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      uint32_t &low = x[i], &high = x[i | bit];
      const uint32_t received = __shfl_xor_sync(0xffffffffu, upper ? low : high, bit);
      (upper ? low : high) = received;
    }
  }
}

// Stores a warpgroup's 64 rows of M^T, from row `row0` on, which it holds as a state.
template <int kK>
__device__ __forceinline__ void store_transition(const float (&state)[kK / 2], void* to, int row0) {
  auto& m = *static_cast<Transition<kK>*>(to);
#pragma unroll
  for (int n = 0; n < kK / 16; ++n) {  // 32 columns of a row and the eighth from there
    const int row = state_column(row0) + n % 2 * 8;
    uint32_t head[4], tail[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = &state[4 * (n / 2 * 4 + i) + n % 2 * 2];
      split(head[i], tail[i], pair[0], pair[1]);
    }
    transpose_words(head), transpose_words(tail);  // a lane has 8 columns
    const int offset = tile_offset(row, n / 2 % 2 * 32 + threadIdx.x % 4 * 8);
    *reinterpret_cast<uint4*>(m.head[n / 4] + offset) =
        make_uint4(head[0], head[1], head[2], head[3]);
    *reinterpret_cast<uint4*>(m.tail[n / 4] + offset) =
        make_uint4(tail[0], tail[1], tail[2], tail[3]);
  }
}

// Visits the same where the walk breaks off, in float and the threads' order: each warp's within
// what it is to store when it is whole, so that no warp overwrites what another has yet to load.
template <int kK, typename Visit>
__device__ __forceinline__ void visit_unfinished(float (&state)[kK / 2], void* to, int row0,
                                                 Visit visit) {
  auto& m = *static_cast<Transition<kK>*>(to);
  const int first = (row0 + threadIdx.x / 32 % 4 * 16) * 128 + threadIdx.x % 32 * 16;
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) {
    unsigned char* piece =
        (n / 4 < kK / 64 ? m.head : m.tail)[n / 4 % (kK / 64)] + first + n % 4 * 512;
    visit(*reinterpret_cast<float4*>(piece), &state[4 * n]);
  }
}
template <int kK>
__device__ __forceinline__ void store_unfinished(float (&state)[kK / 2], void* to, int row0) {
  visit_unfinished<kK>(state, to, row0, store_four);
}
template <int kK>
__device__ __forceinline__ void load_unfinished(float (&state)[kK / 2], void* from, int row0) {
  visit_unfinished<kK>(state, from, row0, load_four);
}

}  // namespace efla::cuda::sm90
