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
  static constexpr bool kOutput = kWalk == Walk::kOutput, kKeep = kWalk == Walk::kKeep;
  static constexpr int kStages = kOutput ? 4 : 3;  // of k: what makes A_hat begins with it
  static constexpr bool kScores = kOutput || kKeep;
  static constexpr int kQueryStages = kScores ? 3 : 1, kValueStages = kKeep ? 2 : 3;

  unsigned char k[kStages][kK / 64][kTile];
  unsigned char q[kQueryStages][kScores ? kK / 64 : 1][kScores ? kTile : 1024];
  unsigned char v[kValueStages][kGroups][kTile];  // later o or U
  unsigned char kept[kKeep ? kGroups : 1][kKeep ? kK / 64 : 1][kKeep ? kTile : 1024];  // S^T
  unsigned char inverse[2][kTile];
  unsigned char scores[kScores ? 2 : 1][kScores ? kTile : 1024];
  PrepareScratch<2> scratch;
  ChunkScalars scalars[kStages];
  Barrier keys_full[kStages], keys_free[kStages];  // k; scalars
  Barrier queries_full[kQueryStages], queries_free[kQueryStages];
  Barrier values_full[kValueStages], values_free[kValueStages];  // v
  Barrier lower_full[2], lower_free[2];                          // L_hat
  Barrier ready[2], scores_ready[2], triangles_free[2];          // inverse and scalars, scores
};

// Of the auxiliary warpgroup alone, which prepares chunks for several walks (prepare_kernel).
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

// Chunks take the buffers of rings of 2, 3 or 4 in turn; this counts them for all of these. Of a
// ring of kSize: the chunk's buffer, and the parity of its round there.
struct ChunkCount {
  int chunk = 0;
  Ring<3> thirds = {};

  template <int kSize>
  __device__ __forceinline__ int buffer() const {
    return kSize == 3 ? thirds.index : chunk % kSize;
  }
  template <int kSize>
  __device__ __forceinline__ uint32_t round() const {
    return kSize == 3 ? thirds.round : chunk / kSize & 1;
  }
  __device__ __forceinline__ void advance() {
    ++chunk;
    thirds.advance();
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
    for (int i = 0; i < Shared::kQueryStages; ++i) {
      s.queries_full[i].init(1);
      s.queries_free[i].init((Shared::kOutput ? walkers : 0) + 4 * ((kHalves > 0) + (kHalves < 2)));
    }
    for (int i = 0; i < Shared::kValueStages; ++i) {
      s.values_full[i].init(1);
      s.values_free[i].init(Shared::kScores ? Shared::kGroups : walkers);
    }
    for (int i = 0; i < 2; ++i) {
      s.lower_full[i].init(kWarpgroup);
      s.lower_free[i].init(4);
      s.ready[i].init(prepared ? 1 : kWarpgroup);
      s.scores_ready[i].init((kHalves > 0) * 4 + (kHalves < 2) * 4);
      s.triangles_free[i].init(walkers);
    }
    fence_barrier_init();
  }
  __syncthreads();
}

// Brings in the chunks of one tensor, one after the other.
template <int kBoxes, int kStages>
struct Feeder {
  using Tile = unsigned char[kBoxes][kC * 128];
  const CUtensorMap& map;
  Tile* tiles;
  Barrier *full, *free;
  int column, head, token, row, left;  // left: chunks
  Ring<kStages> ring = {};

  __device__ __forceinline__ Feeder(const CUtensorMap& map, Tile* tiles, Barrier* full,
                                    Barrier* free, const Place& p, int column, int head, bool any)
      : map(map),
        tiles(tiles),
        full(full),
        free(free),
        column(column),
        head(head),
        token(static_cast<int>(p.begin)),
        row(static_cast<int>(p.row)),
        left(any ? chunks_of(p) : 0) {}

  // The next chunk, if there is one, once there is room for it.
  __device__ __forceinline__ void feed() {
    if (left == 0) return;
    const int i = ring.index;
    free[i].wait(ring.round ^ 1);
    full[i].arrive_expecting(kBoxes * kC * 128);
    for (int j = 0; j < kBoxes; ++j) {
      load_box(tiles[i][j], map, full[i], column + 64 * j, head, token, row);
    }
    --left;
    token += kC;
    ring.advance();
  }
};

// The thread that feeds a walk, each tensor as early as there is room: in this order the walk gives
// back what it has read.
template <int kK, int kV, Walk kWalk>
__device__ __forceinline__ void feed(const ScanMaps& maps, const ScanArgs& args,
                                     ScanShared<kK, kV, kWalk>& s, const Place& p, bool values) {
  using Shared = ScanShared<kK, kV, kWalk>;
  Feeder<kK / 64, Shared::kStages> k(maps.k, s.k, s.keys_full, s.keys_free, p, 0, p.hk, true);
  Feeder<kV / 64, Shared::kValueStages> v(maps.v, s.v, s.values_full, s.values_free, p, p.column0,
                                          p.hv, values);
  const auto feed_all = [&](auto feed_queries) {
    for (int i = 0; i < Shared::kStages; ++i) k.feed();
    for (int i = 0; i < Shared::kQueryStages; ++i) feed_queries();
    for (int i = 0; i < Shared::kValueStages; ++i) v.feed();
    // o leaves from v's buffer while the walk is at the next chunk.
    for (int c = 1; k.left + v.left > 0; ++c) {
      k.feed();
      feed_queries();
      if (!Shared::kOutput || c > 1) v.feed();
    }
  };
  if constexpr (Shared::kScores) {
    Feeder<kK / 64, Shared::kQueryStages> q(maps.q, s.q, s.queries_full, s.queries_free, p, 0, p.hk,
                                            !args.prepared);
    feed_all([&] { q.feed(); });
  } else {
    feed_all([] {});
  }
}

// Where the backward's workspaces hold chunk `chunk` of a place. Tiles lie there as in shared
// memory.
__device__ __forceinline__ int64_t workspace_place(const ChunkArgs& a, const Place& p, int chunk) {
  return (int64_t{p.slot} + chunk) * a.value_heads + p.hv;
}

}  // namespace efla::cuda::sm90
