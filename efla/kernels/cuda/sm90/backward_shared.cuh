// What the roles of the backward walk (backward_walk.cuh) share: tensor maps, shared memory, and
// how its tiles are read.
#pragma once

#include "efla/kernels/cuda/sm90/scan_shared.cuh"

namespace efla::cuda::sm90 {

inline constexpr int kScalarWarps = 2;  // a thread per token

// Boxes as in the scan.
struct BackwardMaps {
  CUtensorMap q, k, v, grad_o;  // [B, T, H, K], [B, T, HV, V]
  CUtensorMap grad_q, grad_k;   // likewise, where heads are not grouped
};

using Tile = unsigned char[kC * 128];  // 64 rows of 64 columns

// A power of two per token, as the exponent of a float.
struct Units {
  unsigned char exponent[kC];

  __device__ __forceinline__ void set(int t, float unit) {
    exponent[t] = static_cast<unsigned char>(__float_as_uint(unit) >> 23);
  }
  __device__ __forceinline__ float get(int t) const {
    return __uint_as_float(uint32_t{exponent[t]} << 23);
  }
  // 1 / unit: unit_of() leaves that a normal number.
  __device__ __forceinline__ float inverse(int t) const {
    return __uint_as_float((254u - exponent[t]) << 23);
  }
};

// Per token, from the scalars' warps to the warpgroup of dQ and dK, and to the chain. |k| is that
// of what the step rule sees (1 for a zero key), r = 1 / |k| of the optional l2 normalisation,
// else 1.
struct TokenFactors {
  float row[kC];        // -r |k|
  float symmetric[kC];  // -e r |k|: of D o dL o K in dK
  float column[kC];     // r / |k|, with decay; else U comes with it
  // As in RowFactors; head: the decay from before a token's 16 to it.
  float gate[kC], head[kC], query_head[kC], column_tail[kC];
  alignas(16) float block_gate[4];
  float query[kC];  // scale, times 1 / |q| of the optional l2 normalisation
  float key[kC];    // r
  // Of Z and X in dK: -e Gamma r |k|, and with decay exp(G_C - G) r / |k|, which counts as 2^-60 of
  // the former at least. Then z is the quotient: dK begins with x (z Z + X).
  float z[kC], x[kC];
  float y[kC];       // with decay Gamma times query: of Y in dQ
  Units key_unit;    // what the row of K has been divided by
  Units query_unit;  // and of Q, in chunks with long rows
};

// Per token, the other way.
struct TokenSums {
  float zk[kC];     // row sums of Z o K
  float lower[kC];  // and of D o dL o KK^T
  // With decay q.dQ, k.(gate_k X + scale (D o dP)^T Q), and the column sums of B o KK^T by warp,
  // for the blocks of 16 up to the warp's own.
  float query[kC], key[kC], columns[4][kC];
};

// Row sums of D o dL o KK^T over the columns of that warpgroup of the chain. The second has none
// in the first half of the chunk: the others fit where the first warp has no columns.
__device__ __forceinline__ float (&lower_rows(TokenSums& sums, int group))[kC] {
  return group == 0 ? sums.lower : sums.columns[0];
}

// K and V padded to kDim; kAdvance: for the chain of state_gradient.cuh alone.
template <int kDim, bool kAdvance>
struct BackwardShared {
  static constexpr int kTiles = kDim / 64;  // across K or V; warpgroups of the chain, too
  static constexpr int kTile = kC * 128;
  static constexpr int kStages = kAdvance ? 3 : 2;  // of k, q
  // Of dO, the triangles and scalars; and of U, S, dS, dR: with two the chain may be a chunk ahead.
  static constexpr int kOthers = kAdvance || kDim == 64 ? 2 : 1;
  static constexpr int kKept = kAdvance ? 1 : kOthers;
  static constexpr int kRest = kAdvance ? 8 : kTile;

  unsigned char k[kStages][kTiles][kTile], q[kStages][kTiles][kTile];
  unsigned char grad_o[kOthers][kTiles][kTile];                   // later dQ
  unsigned char inverse[kOthers][kTile], scores[kOthers][kTile];  // A_hat, P_hat^T; then v
  unsigned char grad_state[kKept][kTiles][kTiles][kTile];  // dS^T after the chunk, [of V][of K]
  unsigned char state[kKept][kTiles][kTiles][kRest];       // S^T before it
  unsigned char u[kKept][kTiles][kRest], grad_r[kKept][kTiles][kRest];
  unsigned char pairs[3][kRest];  // C x C operands of dQ and dK, later dK
  ChunkScalars scalars[kOthers];  // of the forward walk
  WholeChunk whole[kStages];      // of these, with k and q
  TokenFactors factors[2];        // of alternate chunks
  TokenSums sums;
  float write_dot[2][kTiles][kC];  // dR.v by tile of V, of alternate chunks
  // Parts of <S, dS> behind the chunk, by warp of the chain; of a sum over tokens, by warp.
  float through[2][4 * kTiles];
  float halves[2][kScalarWarps];

  Place place;  // of the block; here, and not in registers, where it would spill

  Barrier tokens_full[kStages], tokens_free[kStages];  // k, q
  Barrier grad_o_full[kOthers], grad_o_free[kOthers];
  Barrier grad_o_read[kKept];                                // by the chain
  Barrier triangles_full[kOthers], triangles_free[kOthers];  // inverse, scores, scalars
  Barrier triangles_read[kOthers], values_full[kOthers];     // inverse, scores; v in their place
  Barrier u_full[kKept], u_free[kKept];
  Barrier state_full[kKept], state_free[kKept];
  Barrier grad_state_full[kKept], grad_state_free[kKept];
  Barrier grad_r_full[kKept], grad_r_free[kKept];
  Barrier factors_full[2], factors_free[2];
  Barrier sums_full, diagonal_full;
  // Of alternate chunks: the chain may be done with the next before the scalars look at this one.
  Barrier write_dot_full[2];
  Barrier cleared;                 // zeros in place of what lies behind the sequence
  Barrier lower_full, lower_free;  // B + B^T and the sums that come with it
  Barrier erased_full, sums_free;  // with decay: zk; sums

  __device__ __forceinline__ unsigned char (&value_tile(int buffer, int tile))[kTile] {
    return tile == 0 ? inverse[buffer] : scores[buffer];
  }
};

template <int kDim>
using GradientShared = BackwardShared<kDim, false>;

// Chunks of the place are visited in this order.
__device__ __forceinline__ int reversed(int chunks, int step) { return chunks - 1 - step; }

// Of that chunk's tokens, kC but in the first step.
__device__ __forceinline__ int tokens_of(const Place& p, int chunk) {
  return min(kC, static_cast<int>(p.tokens) - chunk * kC);
}

// Sums over a warp, and over the four lanes that share a row of an accumulator; in all of them.
__device__ __forceinline__ float sum_warp(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}
__device__ __forceinline__ float sum_quad(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <typename T>
__device__ __forceinline__ uint32_t add_pairs(uint32_t x, uint32_t y) {
  using Pair = std::conditional_t<kIsBfloat16<T>, __nv_bfloat162, __half2>;
  const Pair sum = __hadd2(*reinterpret_cast<const Pair*>(&x), *reinterpret_cast<const Pair*>(&y));
  return *reinterpret_cast<const uint32_t*>(&sum);
}

__device__ __forceinline__ uint32_t multiply_pairs(uint32_t x, uint32_t y) {
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&x),
                                         *reinterpret_cast<const __nv_bfloat162*>(&y));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// Of two pieces of 8 elements.
template <typename T>
__device__ __forceinline__ float dot(const uint4& x, const uint4& y) {
  const uint32_t u[4] = {x.x, x.y, x.z, x.w}, v[4] = {y.x, y.y, y.z, y.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 p = unpack<T>(u[i]), q = unpack<T>(v[i]);
    sum += p.x * q.x + p.y * q.y;
  }
  return sum;
}

}  // namespace efla::cuda::sm90
