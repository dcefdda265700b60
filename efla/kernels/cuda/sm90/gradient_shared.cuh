// What the Hopper gradients keep in shared memory, and how its tiles are read and written.
#pragma once

#include "efla/kernels/cuda/portable/chunk_scalars.cuh"
#include "efla/kernels/cuda/sm90/chunk.cuh"

namespace efla::cuda::sm90 {

inline constexpr int kDim = 128;  // K and V
inline constexpr int kGradientGroups = 4;

// Boxes of 64 x 64: q, k, v, grad_o as in the scan; the others over all rows of the workspaces.
struct GradientMaps {
  CUtensorMap q, k, v, grad_o;    // [B, T, H, 128]
  CUtensorMap u, grad_r;          // [slots * HV * kC, 128]
  CUtensorMap state, grad_state;  // transposed, [slots * HV * V, 128]
};

struct GradientShared {
  static constexpr int kTile = kC * 128;
  unsigned char k[2][kTile], q[2][kTile], grad_o[2][kTile], v[2][kTile];  // columns in halves
  unsigned char u[2][kTile], grad_r[2][kTile];
  unsigned char state[2][2][kTile], grad_state[2][2][kTile];  // [half of V][half of K]
  unsigned char symmetric[kTile];   // (B + B^T), columns scaled for K as stored
  unsigned char query_side[kTile];  // scale (D o dP), columns scaled for K as stored
  unsigned char key_side[kTile];    // its transpose, scaled for Q as stored
  TokenScalars<kC> scalars;
  float zk[kC], yq[kC], xk[kC];      // row sums of Z o K, Y o Q, X o K
  float key_dot[kC], query_dot[kC];  // of dK o K, dQ o Q
  float row_sum[2][kC];              // of D o dL o KK^T and of D o dP o scale QK^T
  float column_sum[2][4][kC];        // of B o KK^T and of the latter, by warp
  float state_dot[16];               // parts of <S0, dS>
  float write_dot[kC];               // dR.v
  float grad_gate[kC], out_dot[kC];
  float z_factor[kC], x_factor[kC], y_factor[kC], k_factor[kC];
  float half_gate[kC];
  Barrier keys_full, values_full, states_full;
};

// Sums over the four lanes that share a row of an accumulator.
__device__ __forceinline__ float sum_quad(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Piece p of 16 bytes of row r in a pair of tiles.
__device__ __forceinline__ uint4& piece(unsigned char (&tiles)[2][kC * 128], int r, int p) {
  return *reinterpret_cast<uint4*>(tiles[p / 8] + r * 128 + ((p % 8) ^ (r % 8)) * 16);
}

template <typename T>
__device__ __forceinline__ void put(unsigned char* tile, int r, int c, float x) {
  *reinterpret_cast<T*>(tile + tile_offset(r, c)) = T(x);
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

// Sums over eight neighbouring lanes.
__device__ __forceinline__ float sum_eight(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  x += __shfl_xor_sync(0xffffffffu, x, 2);
  return x + __shfl_xor_sync(0xffffffffu, x, 4);
}

}  // namespace efla::cuda::sm90
