// The backward on Hopper: one block walks a sequence's chunks from last to first, K and V padded to
// kDim. A warpgroup per 64 columns of V holds the gradient of the state (state_gradient.cuh), one
// makes dQ and dK (token_gradients.cuh), two warps own the scalars (scalar_gradients.cuh), two
// threads feed them.
#pragma once

#include "efla/kernels/cuda/sm90/scalar_gradients.cuh"
#include "efla/kernels/cuda/sm90/state_gradient.cuh"
#include "efla/kernels/cuda/sm90/token_gradients.cuh"

namespace efla::cuda::sm90 {

// The thread that feeds k, q and dO.
template <typename Shared>
__device__ __forceinline__ void feed_tokens(const BackwardMaps& maps, const ChunkArgs& a, Shared& s,
                                            const Place& p) {
  constexpr int kTile = Shared::kTile, kTiles = Shared::kTiles;
  const int chunks = chunks_of(p), row = static_cast<int>(p.row);
  Ring<Shared::kStages> ring;
  Ring<Shared::kOthers> others;
  for (int step = 0; step < chunks; ++step, ring.advance(), others.advance()) {
    const int i = ring.index, j = others.index;
    const int token = static_cast<int>(p.begin) + reversed(chunks, step) * kC;
    s.tokens_free[i].wait(ring.round ^ 1);
    constexpr int kWhole = static_cast<int>(sizeof(WholeChunk));
    s.tokens_full[i].arrive_expecting(2 * kTiles * kTile + kWhole);
    for (int n = 0; n < kTiles; ++n) {
      load_box(s.k[i][n], maps.k, s.tokens_full[i], 64 * n, p.hk, token, row);
      load_box(s.q[i][n], maps.q, s.tokens_full[i], 64 * n, p.hk, token, row);
    }
    const int64_t place = workspace_place(a, p, reversed(chunks, step));
    const auto& scalars =
        *reinterpret_cast<const ChunkScalars*>(a.scalars + place * kScalarRows * kC);
    load_bytes(&s.whole[i], &scalars.whole, kWhole, s.tokens_full[i]);
    s.grad_o_free[j].wait(others.round ^ 1);
    s.grad_o_full[j].arrive_expecting(kTiles * kTile);
    for (int n = 0; n < kTiles; ++n) {
      load_box(s.grad_o[j][n], maps.grad_o, s.grad_o_full[j], 64 * n, p.hv, token, row);
    }
  }
}

// The thread that feeds what the forward walk kept, and v behind the triangles.
template <bool kErase, int kDim, bool kAdvance>
__device__ __forceinline__ void feed_kept(const BackwardMaps& maps, const ChunkArgs& a,
                                          BackwardShared<kDim, kAdvance>& s, const Place& p) {
  using Shared = BackwardShared<kDim, kAdvance>;
  constexpr int kTile = Shared::kTile, kTiles = Shared::kTiles;
  constexpr int kBytes = (kErase ? 2 : 1) * kTile + static_cast<int>(sizeof(ChunkScalars));
  const int chunks = chunks_of(p);
  Ring<Shared::kOthers> ring;
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
    if constexpr (!kAdvance) {
      constexpr int kWide = kTiles * kTile, kState = kTiles * kWide;
      s.state_free[i].wait(ring.round ^ 1);
      s.state_full[i].arrive_expecting(kState);
      load_bytes(s.state[i], static_cast<unsigned char*>(a.states) + place * kState, kState,
                 s.state_full[i]);
      s.u_free[i].wait(ring.round ^ 1);
      s.u_full[i].arrive_expecting(kWide);
      load_bytes(s.u[i], static_cast<unsigned char*>(a.u) + place * kWide, kWide, s.u_full[i]);
      s.triangles_read[i].wait(ring.round);
      s.values_full[i].arrive_expecting(kWide);
      for (int n = 0; n < kTiles; ++n) {
        load_box(s.value_tile(i, n), maps.v, s.values_full[i], 64 * n, p.hv,
                 static_cast<int>(p.begin) + reversed(chunks, step) * kC, static_cast<int>(p.row));
      }
    }
  }
}

template <bool kErase, bool kDecay, int kDim, bool kAdvance>
__device__ __forceinline__ void init_barriers(BackwardShared<kDim, kAdvance>& s) {
  using Shared = BackwardShared<kDim, kAdvance>;
  constexpr int kChain = Shared::kTiles * kWarpgroup, kChainWarps = 4 * Shared::kTiles;
  constexpr int kTokenWarps = kAdvance ? 0 : 4;
  constexpr int kOtherWarps = kAdvance ? 0 : kScalarWarps;
  constexpr bool kLower = kErase && !kAdvance;  // the chain makes B + B^T
  constexpr int kLowerWarps = kLower ? kChainWarps : 0;
  constexpr int kDotWarps = kDecay && !kAdvance ? kChainWarps : 0;  // the chain reads S and U
  for (int i = 0; i < Shared::kStages; ++i) {
    s.tokens_full[i].init(1);
    s.tokens_free[i].init(kChainWarps + kTokenWarps + kOtherWarps);
  }
  for (int i = 0; i < Shared::kOthers; ++i) {
    s.grad_o_full[i].init(1), s.grad_o_free[i].init(kAdvance ? kChainWarps : 1);
    s.triangles_full[i].init(1), s.triangles_free[i].init(kChain);
    s.triangles_read[i].init(kChainWarps), s.values_full[i].init(1);
  }
  for (int i = 0; i < 2; ++i) {
    s.factors_full[i].init(32 * kScalarWarps),
        s.factors_free[i].init(kWarpgroup + (kLower ? kChain : 0));
  }
  for (int i = 0; i < Shared::kKept; ++i) {
    s.u_full[i].init(1), s.u_free[i].init(4 + (kLower ? kLowerWarps : kDotWarps));
    s.state_full[i].init(1), s.state_free[i].init(4 + kDotWarps);
    s.grad_state_full[i].init(kChain);
    s.grad_state_free[i].init(4 + (Shared::kKept == 2 ? 32 * kScalarWarps : 0));
    s.grad_r_full[i].init(kChain);
    s.grad_r_free[i].init(4 + kLowerWarps);
  }
  for (Barrier& full : s.write_dot_full) full.init(kChain);
  s.sums_full.init(kWarpgroup), s.diagonal_full.init(32 * kScalarWarps);
  for (int i = 0; i < Shared::kKept; ++i) s.grad_o_read[i].init(kChainWarps);
  s.cleared.init(kChain);
  if constexpr (!kAdvance) {
    s.lower_full.init(kChain), s.lower_free.init(4);
    s.erased_full.init(kWarpgroup), s.sums_free.init(32 * kScalarWarps);
  }
  fence_barrier_init();
}

template <int kDim, bool kAdvance>
inline constexpr int kBackwardThreads = (kDim / 64 + (kAdvance ? 1 : 2)) * kWarpgroup;

// One block per (sequence or part of one, value head). kPadded: K or V is smaller than kDim; the
// comparisons that this takes would cost the others a tenth of their time. kOverScale: walk_back().
template <typename T, int kDim, bool kPadded, bool kErase, bool kDecay, bool kAdvance,
          bool kOverScale>
__global__ void __launch_bounds__(kBackwardThreads<kDim, kAdvance>, 1)
    backward_kernel(const __grid_constant__ BackwardMaps maps,
                    const __grid_constant__ ScanArgs args) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  using Shared = BackwardShared<kDim, kAdvance>;
  auto& s = *reinterpret_cast<Shared*>(shared_bytes);
  if (threadIdx.x == 0) init_barriers<kErase, kDecay>(s);
  wait_for_stream();
  if (threadIdx.x == 0) {
    s.place = find_place(args, kDim);
    if (kAdvance && s.place.first) s.place.sequence = -1;  // nobody asks for dS before it
  }
  __syncthreads();
  const Place& p = s.place;
  const int group = threadIdx.x / kWarpgroup;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  constexpr bool kTrade = kDim == 128;  // registers; for 64 all have enough from the start
  if (group < Shared::kTiles) {
    if constexpr (kTrade) take_registers<kAdvance ? 208 : 160>();
    walk_back<T, kPadded, kErase, kDecay, kOverScale>(args, s, p);
    return;
  }
  if constexpr (!kAdvance) {
    if (group == Shared::kTiles) {
      if constexpr (kTrade) take_registers<144>();
      walk_tokens<T, kDim, kPadded, kErase, kDecay>(maps, args.common, s, p);
      return;
    }
  }
  if constexpr (kTrade) give_registers<kAdvance ? 40 : 48>();
  if (warp == 0 && elect_one()) feed_tokens(maps, args.common, s, p);
  if (warp == 1 && elect_one()) feed_kept<kErase>(maps, args.common, s, p);
  if constexpr (!kAdvance) {
    const int token = threadIdx.x % (32 * kScalarWarps);
    if (warp >= 2) ScalarGradients<T, kDim, kErase, kDecay>{args.common, s, p, token, lane}.walk();
  }
}

}  // namespace efla::cuda::sm90
