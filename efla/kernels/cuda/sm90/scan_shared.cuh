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
  static constexpr int kValueStages = kKeep ? 2 : 3;

  unsigned char k[kStages][kK / 64][kTile];
  unsigned char q[kScores ? kStages : 1][kScores ? kK / 64 : 1][kScores ? kTile : 1024];
  unsigned char v[kValueStages][kGroups][kTile];  // later o or U
  unsigned char kept[kKeep ? kGroups : 1][kKeep ? kK / 64 : 1][kKeep ? kTile : 1024];  // S^T
  unsigned char inverse[2][kTile];
  unsigned char scores[kScores ? 2 : 1][kScores ? kTile : 1024];
  PrepareScratch<2> scratch;
  ChunkScalars scalars[kStages];
  Barrier keys_full[kStages], keys_free[kStages];                // k and q; scalars
  Barrier values_full[kValueStages], values_free[kValueStages];  // v
  Barrier lower_full[2], lower_free[2];                          // L_hat
  Barrier ready[2], scores_ready[2], triangles_free[2];          // inverse and scalars, scores
};

// Of prepare_kernel, in which one warpgroup prepares and inverts chunks for several walks.
template <int kK>
struct PrepareShared {
  static constexpr int kTile = kC * 128;
  static constexpr int kStages = 2;
  static constexpr bool kScores = true;

  unsigned char k[kStages][kK / 64][kTile], q[kStages][kK / 64][kTile];
  unsigned char inverse[kTile], scores[kTile];
  PrepareScratch<1> scratch;
  ChunkScalars scalars;
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

// Of P_hat's two halves of 32 columns, how many the warpgroup makes that prepares chunks; the one
// that inverts makes the others.
template <bool kErase, bool kDecay, Walk kWalk>
inline constexpr int kPreparedHalves = kErase&& kWalk == Walk::kOutput ? (kDecay ? 0 : 1) : 2;

template <int kHalves, typename Shared>
__device__ __forceinline__ void init_barriers(Shared& s, bool prepared) {
  if (threadIdx.x == 0) {
    const int walkers = 4 * Shared::kGroups;  // warps
    const int makers = Shared::kScores && !prepared ? 4 * (kHalves < 2 ? 2 : 1) : 0;
    for (int i = 0; i < Shared::kStages; ++i) {
      s.keys_full[i].init(1);
      s.keys_free[i].init(walkers + makers);
    }
    for (int i = 0; i < Shared::kValueStages; ++i) {
      s.values_full[i].init(1);
      s.values_free[i].init(Shared::kScores ? Shared::kGroups : walkers);
    }
    for (int i = 0; i < 2; ++i) {
      s.lower_full[i].init(kWarpgroup);
      s.lower_free[i].init(kWarpgroup);
      s.ready[i].init(prepared ? 1 : kWarpgroup);
      s.scores_ready[i].init((kHalves > 0) * 4 + (kHalves < 2) * 4);
      s.triangles_free[i].init(walkers);
    }
    fence_barrier_init();
  }
  __syncthreads();
}

// Of the thread that feeds k and, where they are wanted, queries.
template <int kK, typename Shared>
struct KeyFeeder {
  const ScanMaps& maps;
  Shared& s;
  int token, hk, row, left;  // left: chunks
  bool queries;
  Ring<Shared::kStages> ring = {};

  __device__ __forceinline__ KeyFeeder(const ScanMaps& maps, Shared& s, const Place& p,
                                       bool queries)
      : maps(maps),
        s(s),
        token(static_cast<int>(p.begin)),
        hk(p.hk),
        row(static_cast<int>(p.row)),
        left(chunks_of(p)),
        queries(queries) {}

  // The next chunk, if there is one, once there is room for it.
  __device__ __forceinline__ void feed() {
    if (--left < 0) return;
    const int i = ring.index;
    s.keys_free[i].wait(ring.round ^ 1);
    s.keys_full[i].arrive_expecting((queries ? 2 : 1) * kK * kC * 2);
    for (int j = 0; j < kK / 64; ++j) {
      load_box(s.k[i][j], maps.k, s.keys_full[i], 64 * j, hk, token, row);
      if (Shared::kScores && queries) {
        load_box(s.q[i][j], maps.q, s.keys_full[i], 64 * j, hk, token, row);
      }
    }
    token += kC;
    ring.advance();
  }
};

// Of the thread that feeds v: another, for v's buffers are free later than those of k and q.
template <int kK, int kV, Walk kWalk>
struct ValueFeeder {
  using Shared = ScanShared<kK, kV, kWalk>;
  const ScanMaps& maps;
  Shared& s;
  int token, hv, row, column0, left;
  Ring<Shared::kValueStages> ring = {};

  __device__ __forceinline__ ValueFeeder(const ScanMaps& maps, Shared& s, const Place& p)
      : maps(maps),
        s(s),
        token(static_cast<int>(p.begin)),
        hv(p.hv),
        row(static_cast<int>(p.row)),
        column0(p.column0),
        left(chunks_of(p)) {}

  __device__ __forceinline__ void feed() {
    if (--left < 0) return;
    const int i = ring.index;
    s.values_free[i].wait(ring.round ^ 1);
    s.values_full[i].arrive_expecting(kV * kC * 2);
    for (int j = 0; j < kV / 64; ++j) {
      load_box(s.v[i][j], maps.v, s.values_full[i], column0 + 64 * j, hv, token, row);
    }
    token += kC;
    ring.advance();
  }
};

// Where the backward's workspaces hold chunk `chunk` of a place. Tiles lie there as in shared
// memory.
__device__ __forceinline__ int64_t workspace_place(const ChunkArgs& a, const Place& p, int chunk) {
  return (int64_t{p.slot} + chunk) * a.value_heads + p.hv;
}

}  // namespace efla::cuda::sm90
