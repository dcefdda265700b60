// What the roles of the scan (scan.cuh) share: shared memory, its rings of buffers, who feeds them.
#pragma once

#include "efla/kernels/cuda/sm90/prepare.cuh"

namespace efla::cuda::sm90 {

// What a walk is for.
enum class Walk {
  kOutput,   // o and the final state
  kAdvance,  // the state after each part, and (blockIdx.y = 1) the part's transition
  kKeep,  // for the backward: the state before each chunk, U, and what the chunk's triangles hold
};

template <int kK, int kV, Walk kWalk>
struct ScanShared {
  static constexpr int kGroups = kV / 64;
  static constexpr int kTile = kC * 128;
  static constexpr int kStages = 3;
  static constexpr bool kOutput = kWalk == Walk::kOutput, kKeep = kWalk == Walk::kKeep;
  static constexpr bool kScores = kOutput || kKeep;
  // Whether the auxiliary warpgroup makes P_hat; else those of the state do. With decay it has the
  // longer chain by far (4 x 8192 tokens, 32 heads: 0.47 ms for 0.50), without 0.37 and 0.39.
  template <bool kDecay>
  static constexpr bool kMakesScores = kKeep || (kOutput && !kDecay);
  static constexpr int kValueStages = kKeep ? 2 : 3;
  static constexpr int kSquares = 2;     // buffers of what the auxiliary warpgroup makes
  static constexpr bool kAlone = false;  // it has no walk to work for

  unsigned char k[kStages][kK / 64][kTile];
  unsigned char q[kScores ? kStages : 1][kScores ? kK / 64 : 1][kScores ? kTile : 1024];
  unsigned char v[kValueStages][kGroups][kTile];  // later o or U
  unsigned char kept[kKeep ? kGroups : 1][kKeep ? kK / 64 : 1][kKeep ? kTile : 1024];  // S^T
  unsigned char inverse[2][kTile];
  unsigned char scores[kScores ? 2 : 1][kScores ? kTile : 1024];
  PrepareScratch scratch;
  ChunkScalars scalars[2];
  Barrier keys_full[kStages], keys_free[kStages];                // k and q
  Barrier values_full[kValueStages], values_free[kValueStages];  // v
  Barrier ready[2], triangles_free[2];                           // inverse, scores, scalars
  Barrier scalars_ready[2];  // scalars and factors, ahead of the rest
};

// Of the auxiliary warpgroup alone, which prepares chunks for several walks (prepare_kernel).
template <int kK>
struct PrepareShared {
  static constexpr int kTile = kC * 128;
  static constexpr int kStages = 2, kSquares = 1;
  static constexpr bool kScores = true, kKeep = true, kAlone = true;
  template <bool kDecay>
  static constexpr bool kMakesScores = true;

  unsigned char k[kStages][kK / 64][kTile], q[kStages][kK / 64][kTile];
  unsigned char inverse[1][kTile], scores[1][kTile];
  PrepareScratch scratch;
  ChunkScalars scalars[1];
  Barrier keys_full[kStages], keys_free[kStages];
};

// Lane 0 of a warp arrives for all its lanes.
__device__ __forceinline__ void arrive_warp(Barrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier.arrive();
}

// Position in a ring of buffers: which one is next, and the parity of its present round.
template <int kSize>
struct Ring {
  int index = 0;
  uint32_t round = 0;
  __device__ __forceinline__ void advance() {
    if (++index == kSize) index = 0, round ^= 1;
  }
};

template <typename Shared>
__device__ __forceinline__ void init_barriers(Shared& s, bool prepared) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared::kStages; ++i) {
      s.keys_full[i].init(1);
      s.keys_free[i].init(4 * Shared::kGroups);
    }
    for (int i = 0; i < Shared::kValueStages; ++i) {
      s.values_full[i].init(1);
      s.values_free[i].init(Shared::kScores ? Shared::kGroups : 4 * Shared::kGroups);
    }
    for (int i = 0; i < 2; ++i) {
      s.ready[i].init(prepared ? 1 : kWarpgroup);
      s.scalars_ready[i].init(kWarpgroup);
      s.triangles_free[i].init(4 * Shared::kGroups);
    }
    fence_barrier_init();
  }
  __syncthreads();
}

// The thread that feeds k and, where they are wanted, queries.
template <int kK, typename Shared>
__device__ __forceinline__ void feed_keys(const ScanMaps& maps, Shared& s, const Place& p,
                                          bool queries) {
  const int bytes = (queries ? 2 : 1) * kK * kC * 2;
  const int chunks = chunks_of(p), row = static_cast<int>(p.row);
  int token = static_cast<int>(p.begin);
  Ring<Shared::kStages> ring;
  for (int c = 0; c < chunks; ++c, token += kC, ring.advance()) {
    const int i = ring.index;
    s.keys_free[i].wait(ring.round ^ 1);
    s.keys_full[i].arrive_expecting(bytes);
    for (int j = 0; j < kK / 64; ++j) {
      load_box(s.k[i][j], maps.k, s.keys_full[i], 64 * j, p.hk, token, row);
      if (Shared::kScores && queries) {
        load_box(s.q[i][j], maps.q, s.keys_full[i], 64 * j, p.hk, token, row);
      }
    }
  }
}

// The thread that feeds v: another, for v's buffers are free later than those of k and q.
template <int kK, int kV, Walk kWalk>
__device__ __forceinline__ void feed_values(const ScanMaps& maps, ScanShared<kK, kV, kWalk>& s,
                                            const Place& p) {
  using Shared = ScanShared<kK, kV, kWalk>;
  const int chunks = chunks_of(p), row = static_cast<int>(p.row);
  int token = static_cast<int>(p.begin);
  Ring<Shared::kValueStages> ring;
  for (int c = 0; c < chunks; ++c, token += kC, ring.advance()) {
    const int i = ring.index;
    s.values_free[i].wait(ring.round ^ 1);
    s.values_full[i].arrive_expecting(kV * kC * 2);
    for (int j = 0; j < kV / 64; ++j) {
      load_box(s.v[i][j], maps.v, s.values_full[i], p.column0 + 64 * j, p.hv, token, row);
    }
  }
}

// Where the backward's workspaces hold chunk `chunk` of a place. Tiles lie there as in shared
// memory.
__device__ __forceinline__ int64_t workspace_place(const ChunkArgs& a, const Place& p, int chunk) {
  return (int64_t{p.slot} + chunk) * a.value_heads + p.hv;
}

}  // namespace efla::cuda::sm90
