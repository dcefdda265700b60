// The part of the backward that needs no order, on Hopper: one block per (chunk, value head), K = V
// = 128. From U, dR and the states on both sides of the chunk it makes every gradient of the chunk;
// equations and names are those of the portable chunk_gradients.cuh:
//
//   dL = -strictLower(dR U^T)    dP = tril(dO U^T)    Z = dR S0^T    Y = dO S0^T    X = U dS^T
//   dQ = gate_q Y + scale (D o dP) K        dV = w dR
//   dK = (B + B^T) K - e Gamma Z + scale (D o dP)^T Q + gate_k X + 2 k dlambda,   B = e (dL o D)
//
// Four warpgroups: the first makes dK (Z, X, then the C x C operands times K and Q), the second dQ
// (Y, then its operand times K), the third dL and K K^T, the fourth dP and Q K^T.
#pragma once

#include "efla/kernels/cuda/sm90/gradient_block.cuh"

namespace efla::cuda::sm90 {

template <typename T, bool kDecay>
__global__ void __launch_bounds__(kGradientGroups* kWarpgroup, 1)
    gradients_kernel(const __grid_constant__ GradientMaps maps,
                     const __grid_constant__ ChunkArgs a) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& s = *reinterpret_cast<GradientShared*>(shared_bytes);
  const int64_t place = blockIdx.x;
  const int hv = static_cast<int>(blockIdx.x % a.value_heads), group = a.value_heads / a.heads;
  const Chunk chunk = locate(a, blockIdx.x / a.value_heads, kC);
  if (chunk.sequence < 0) return;
  if (threadIdx.x == 0) {
    s.keys_full.init(1);
    s.values_full.init(1);
    s.states_full.init(1);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const int token = static_cast<int>(chunk.begin), row = static_cast<int>(chunk.row);
    const int hk = hv / group, wide = static_cast<int>(place);
    constexpr int kTile = GradientShared::kTile;
    s.keys_full.arrive_expecting(8 * kTile);
    for (int j = 0; j < 2; ++j) {
      load_box(s.k[j], maps.k, s.keys_full, 64 * j, hk, token, row);
      load_box(s.q[j], maps.q, s.keys_full, 64 * j, hk, token, row);
      load_box(s.grad_o[j], maps.grad_o, s.keys_full, 64 * j, hv, token, row);
      load_box(s.v[j], maps.v, s.keys_full, 64 * j, hv, token, row);
    }
    s.values_full.arrive_expecting(4 * kTile);
    for (int j = 0; j < 2; ++j) {
      load_box(s.grad_r[j], maps.grad_r, s.values_full, 64 * j, 0, wide * kC, 0);
      load_box(s.u[j], maps.u, s.values_full, 64 * j, 0, wide * kC, 0);
    }
    s.states_full.arrive_expecting(8 * kTile);
    for (int j = 0; j < 4; ++j) {
      load_box(s.state[j / 2][j % 2], maps.state, s.states_full, j % 2 * 64, 0,
               wide * kDim + j / 2 * 64, 0);
      load_box(s.grad_state[j / 2][j % 2], maps.grad_state, s.states_full, j % 2 * 64, 0,
               wide * kDim + j / 2 * 64, 0);
    }
  }
  float beta = 0.f, log_decay = 0.f;
  if (static_cast<int>(threadIdx.x) < chunk.tokens) {
    beta = *element<float>(a.beta, chunk.row, chunk.begin + threadIdx.x, hv);
    if (kDecay) log_decay = *element<float>(a.log_decay, chunk.row, chunk.begin + threadIdx.x, hv);
  }
  GradientBlock<T, kDecay> block{a, s, chunk, hv, beta, log_decay};
  s.keys_full.wait(0);
  if (chunk.tokens < kC) block.clear_slack();
  block.make_scalars();
  s.values_full.wait(0);
  block.value_gradients();
  s.states_full.wait(0);
  if constexpr (kDecay) block.state_products();
  const bool parts = group > 1;
  switch (threadIdx.x / kWarpgroup) {
    case 0:
      block.key_gradients(parts);
      break;
    case 1:
      block.query_gradients(parts);
      break;
    case 2:
      block.template finish_pairs<false>();
      __syncthreads();
      if (threadIdx.x % kWarpgroup < kC) block.finish_scalars(threadIdx.x % kWarpgroup);
      block.sync_factors();
      break;
    default:
      block.template finish_pairs<true>();
      __syncthreads();
  }
}

}  // namespace efla::cuda::sm90
