// The serial part of the backward on Hopper, the mirror image of scan.cuh: chunks from last to
// first, two warpgroups with 64 rows each of dS^T [V, K] in float registers, K = V = 128:
//
//   dU^T = dO^T P_hat + gate_k (dS^T K^T)        dR^T = dU^T A_hat
//   dS^T = Gamma_C dS^T + (gate_q dO^T) Q - (e dR^T) K
//
// A_hat, P_hat^T and the scalars come from the forward walk (Walk::kKeep) as it left them in shared
// memory. Keeps dS^T (of the state after each chunk) and dR for gradients.cuh. Where sequences are
// split, a first launch (kAdvance) keeps nothing and takes each part from zero to its N'.
#pragma once

#include "efla/kernels/cuda/sm90/gradients.cuh"
#include "efla/kernels/cuda/sm90/scan.cuh"

namespace efla::cuda::sm90 {

struct ReverseShared {
  static constexpr int kStages = 3, kTile = kC * 128;
  unsigned char k[kStages][2][kTile], q[kStages][2][kTile];
  unsigned char grad_o[kStages][2][kTile];  // halves of V; later dR
  unsigned char inverse[2][kTile], scores[2][kTile];
  unsigned char state[2][2][kTile];  // dS^T on its way out, [half of V][half of K]
  ChunkScalars scalars[2];
  Barrier tokens_full[kStages], tokens_free[kStages];  // k, q, grad_o
  Barrier triangles_full[2], triangles_free[2];        // the others
};

// Chunks of the place are visited in this order.
__device__ __forceinline__ int reversed(int chunks, int step) { return chunks - 1 - step; }

// The thread that feeds k, q and dO.
__device__ __forceinline__ void feed_tokens(const GradientMaps& maps, ReverseShared& s,
                                            const Place& p) {
  const int chunks = chunks_of(p), row = static_cast<int>(p.row);
  Ring<ReverseShared::kStages> ring;
  for (int step = 0; step < chunks; ++step, ring.advance()) {
    const int i = ring.index;
    const int token = static_cast<int>(p.begin) + reversed(chunks, step) * kC;
    s.tokens_free[i].wait(ring.round ^ 1);
    Barrier& full = s.tokens_full[i];
    full.arrive_expecting(6 * ReverseShared::kTile);
    for (int j = 0; j < 2; ++j) {
      load_box(s.k[i][j], maps.k, full, 64 * j, p.hk, token, row);
      load_box(s.grad_o[i][j], maps.grad_o, full, 64 * j, p.hv, token, row);
      load_box(s.q[i][j], maps.q, full, 64 * j, p.hk, token, row);
    }
  }
}

// The thread that feeds what the forward walk kept.
template <bool kErase>
__device__ __forceinline__ void feed_triangles(const ChunkArgs& a, ReverseShared& s,
                                               const Place& p) {
  constexpr int kTile = ReverseShared::kTile;
  constexpr int kBytes = (kErase ? 2 : 1) * kTile + static_cast<int>(sizeof(ChunkScalars));
  const int chunks = chunks_of(p);
  Ring<2> ring;
  for (int step = 0; step < chunks; ++step, ring.advance()) {
    const int i = ring.index;
    const int64_t place = workspace_place(a, p, reversed(chunks, step));
    s.triangles_free[i].wait(ring.round ^ 1);
    Barrier& full = s.triangles_full[i];
    full.arrive_expecting(kBytes);
    if (kErase) {
      load_bytes(s.inverse[i], static_cast<unsigned char*>(a.inverse) + place * kTile, kTile, full);
    }
    load_bytes(s.scores[i], static_cast<unsigned char*>(a.scores) + place * kTile, kTile, full);
    load_bytes(&s.scalars[i], a.scalars + place * kScalarRows * kC, sizeof(ChunkScalars), full);
  }
}

template <typename T, bool kErase, bool kDecay, bool kAdvance>
__device__ __forceinline__ void walk_back(const GradientMaps& maps, const ScanArgs& args,
                                          ReverseShared& s, const Place& p) {
  const ChunkArgs& a = args.common;
  if (p.sequence < 0) return;
  const int chunks = chunks_of(p);
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroup, 0);
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32, warp = thread / 32;
  const int column = 64 * group;
  const int piece = warp * 2 + lane / 8 % 2;
  const uint32_t lane_offset = (lane / 16 * 8 + lane % 8) * 128 + ((piece ^ (lane % 8)) << 4);
  const int64_t state_size = int64_t{kDim} * kDim;
  const int64_t part_offset = (p.part * a.value_heads + p.hv) * state_size;

  float state[kDim / 2] = {};
  if constexpr (!kAdvance) {
    // The slot of a whole sequence is its number.
    const float* from = args.part_tokens == 0 ? a.grad_final_state : args.part_states;
    if (from) {
      from += part_offset;
      visit_state<kDim>(state, kDim, column, [&](int64_t i, float& x) { x = from[i]; });
    }
  }
  uint32_t packed[kDim / 16][4];
#pragma unroll
  for (int n = 0; n < kDim / 16; ++n) pack_step<T>(packed[n], &state[8 * n]);
  Ring<ReverseShared::kStages> ring;
  Ring<2> triangles;
#pragma unroll 1
  for (int step = 0; step < chunks; ++step) {
    const int i = ring.index, j = triangles.index, c = reversed(chunks, step);
    const ChunkScalars& scalars = s.scalars[j];
    s.tokens_full[i].wait(ring.round);
    const int tokens = static_cast<int>(p.tokens) - c * kC;
    if (tokens < kC) {  // what lies behind the sequence may be anything
      const int r = threadIdx.x;
      if (r >= tokens && r < kC) {
        zero_row(s.k[i][0], 2, r);
        zero_row(s.q[i][0], 2, r);
        zero_row(s.grad_o[i][0], 2, r);
      }
      fence_async_proxy();
      sync_threads(1, 2 * kWarpgroup);
    }
    float u[32];
    fence_products();
    multiply_state<T, kDim>(u, packed, s.k[i]);
    const int place = static_cast<int>(workspace_place(a, p, c));
    if constexpr (!kAdvance) {
      // dS^T goes out meanwhile. The step before has waited for its stores.
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        stmatrix_x4(shared_address(s.state[group][n / 4]) +
                        tile_offset(16 * warp + lane % 16, n % 4 * 16 + lane / 16 * 8),
                    packed[n]);
      }
      fence_async_proxy();
      sync_threads(2 + group, kWarpgroup);
      if (thread == 0) {
        for (int half = 0; half < 2; ++half) {
          store_box(maps.grad_state, s.state[group][half], 64 * half, 0, place * kDim + column, 0);
        }
        commit_stores();
      }
    }
    const uint32_t tile = shared_address(s.grad_o[i][group]) + lane_offset;
    uint32_t grad_o[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) ldmatrix_x4_transposed(grad_o[n], tile + n * 16 * 128);
    s.triangles_full[j].wait(triangles.round);
    wait_products<0>();
    pin(u);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 out = scalar_pair(scalars.key_out, n);
#pragma unroll
      for (int h = 0; h < 2; ++h) u[4 * n + 2 * h] *= out.x, u[4 * n + 2 * h + 1] *= out.y;
    }
    pin(u);
    fence_products();
    {
      const uint64_t b = describe_rows(s.scores[j]);
#pragma unroll
      for (int n = 0; n < 4; ++n) product<T>(u, grad_o[n], b + 2 * n, true);
      commit_products();
      wait_products<0>();
      pin(u);
    }
    uint32_t r[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) pack_step<T>(r[n], &u[8 * n]);
    if constexpr (kErase) {
      fence_products();
      const uint64_t b = describe_columns(s.inverse[j], kC * 128);
#pragma unroll
      for (int n = 0; n < 4; ++n) product_columns<T>(u, r[n], b + 128 * n, n > 0);
      commit_products();
    }
#pragma unroll
    for (int n = 0; n < 16; ++n) {  // gate_q dO, column group n / 2
      const float2 query = scalar_pair(scalars.query, n / 2);
      const float2 x = unpack<T>(grad_o[n / 4][n % 4]);
      grad_o[n / 4][n % 4] = pack<T>(query.x * x.x, query.y * x.y);
    }
    if constexpr (kDecay) {
      const float gate = scalars.gate;
#pragma unroll
      for (int n = 0; n < kDim / 2; ++n) state[n] *= gate;
    }
    if constexpr (kErase) {
      wait_products<0>();
      pin(u);
    }
    if constexpr (!kAdvance) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        pack_step<T>(r[n], &u[8 * n]);
        stmatrix_x4_transposed(tile + n * 16 * 128, r[n]);  // dR
      }
      fence_async_proxy();
    }
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const float2 erase = scalar_pair(scalars.erase, n / 2);
      r[n / 4][n % 4] = pack<T>(-erase.x * u[2 * n], -erase.y * u[2 * n + 1]);
    }
    pin(state);
    fence_products();
    {
      const uint64_t q = describe_columns(s.q[i], kC * 128), k = describe_columns(s.k[i], kC * 128);
#pragma unroll
      for (int n = 0; n < 4; ++n) product_columns<T>(state, grad_o[n], q + 128 * n, true);
      if constexpr (kErase) {
#pragma unroll
        for (int n = 0; n < 4; ++n) product_columns<T>(state, r[n], k + 128 * n, true);
      }
      commit_products();
    }
    if constexpr (!kAdvance) {
      sync_threads(2 + group, kWarpgroup);
      if (thread == 0) {
        store_box(maps.grad_r, s.grad_o[i][group], column, 0, place * kC, 0);
        commit_stores();
      }
    }
    wait_products<0>();
    pin(state);
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) pack_step<T>(packed[n], &state[8 * n]);
    if constexpr (!kAdvance) {
      if (thread == 0) wait_stores_read<0>();
      sync_threads(2 + group, kWarpgroup);
    } else {
      __syncwarp();
    }
    if (lane == 0) s.tokens_free[i].arrive();
    s.triangles_free[j].arrive();  // each thread has read scalars
    ring.advance();
    triangles.advance();
  }
  if constexpr (kAdvance) {
    float* to = args.part_results + part_offset;
    visit_state<kDim>(state, kDim, column, [&](int64_t i, float& x) { to[i] = x; });
  } else {
    if (thread == 0) wait_stores<0>();
    if (a.grad_initial_state && p.first) {
      float* to = a.grad_initial_state + (p.sequence * a.value_heads + p.hv) * state_size;
      visit_state<kDim>(state, kDim, column, [&](int64_t i, float& x) { to[i] = x; });
    }
  }
}

inline constexpr int kReverseThreads = 3 * kWarpgroup;

// One block per (sequence or part of one, value head).
template <typename T, bool kErase, bool kDecay, bool kAdvance>
__global__ void __launch_bounds__(kReverseThreads, 1)
    reverse_kernel(const __grid_constant__ GradientMaps maps,
                   const __grid_constant__ ScanArgs args) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& s = *reinterpret_cast<ReverseShared*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < ReverseShared::kStages; ++i) {
      s.tokens_full[i].init(1);
      s.tokens_free[i].init(8);
    }
    for (int i = 0; i < 2; ++i) {
      s.triangles_full[i].init(1);
      s.triangles_free[i].init(2 * kWarpgroup);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 2 * kWarpgroup) {
    take_registers<224>();
    walk_back<T, kErase, kDecay, kAdvance>(maps, args, s, find_place(args, kDim));
  } else {
    give_registers<40>();
    const Place p = find_place(args, kDim);
    if (threadIdx.x == 2 * kWarpgroup) feed_tokens(maps, s, p);
    if (threadIdx.x == 2 * kWarpgroup + 32) feed_triangles<kErase>(args.common, s, p);
  }
}

}  // namespace efla::cuda::sm90
