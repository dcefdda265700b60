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
template <bool kErase, Walk kWalk>
inline constexpr int kPreparedHalves = kErase&& kWalk == Walk::kOutput ? 1 : 2;

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

// Starts copying chunk c of one tensor, if there is one, once there is room for it.
template <int kStages, int kBoxes>
__device__ __forceinline__ void feed_chunk(const CUtensorMap& map,
                                           unsigned char (&tiles)[kStages][kBoxes][kC * 128],
                                           Barrier (&full)[kStages], Barrier (&free)[kStages],
                                           const Place& p, int column, int head, int c) {
  if (c >= chunks_of(p)) return;
  const int i = c % kStages;
  free[i].wait((c / kStages & 1) ^ 1);
  full[i].arrive_expecting(kBoxes * kC * 128);
  for (int j = 0; j < kBoxes; ++j) {
    load_box(tiles[i][j], map, full[i], column + 64 * j, head, static_cast<int>(p.begin) + c * kC,
             static_cast<int>(p.row));
  }
}

// Whether a walk is fed by the warpgroup that prepares, or by the one that inverts: what leaves
// both without spilled registers.
template <Walk kWalk>
inline constexpr bool kFirstFeeds = kWalk == Walk::kOutput;

// The feeding of a walk, by threads of three warps of a warpgroup, so that they wait side by side.
// All of the warpgroup call these.
template <int kK, int kV, Walk kWalk>
__device__ __forceinline__ void feed_chunks(const ScanMaps& maps, ScanShared<kK, kV, kWalk>& s,
                                            const Place& p, int keys, int keys_end, int queries,
                                            int queries_end, int values, int values_end) {
  const int thread = threadIdx.x % kWarpgroup;
  if (thread == 0) {
    for (; keys < keys_end; ++keys) {
      feed_chunk(maps.k, s.k, s.keys_full, s.keys_free, p, 0, p.hk, keys);
    }
  } else if (thread == 32) {
    for (; values < values_end; ++values) {
      feed_chunk(maps.v, s.v, s.values_full, s.values_free, p, p.column0, p.hv, values);
    }
  } else if (thread == 64) {
    if constexpr (ScanShared<kK, kV, kWalk>::kScores) {
      for (; queries < queries_end; ++queries) {
        feed_chunk(maps.q, s.q, s.queries_full, s.queries_free, p, 0, p.hk, queries);
      }
    }
  }
  __syncwarp();
}

// What there is room for at the start.
template <int kK, int kV, Walk kWalk>
__device__ __forceinline__ void feed_first(const ScanMaps& maps, ScanShared<kK, kV, kWalk>& s,
                                           const Place& p) {
  using Shared = ScanShared<kK, kV, kWalk>;
  feed_chunks(maps, s, p, 0, Shared::kStages, 0, Shared::kQueryStages, 0, Shared::kValueStages);
}
// What the walk makes room for when it is done with chunk c - 2, as it gives back the triangles.
template <int kK, int kV, Walk kWalk>
__device__ __forceinline__ void feed_with_triangles(const ScanMaps& maps,
                                                    ScanShared<kK, kV, kWalk>& s, const Place& p,
                                                    int c) {
  using Shared = ScanShared<kK, kV, kWalk>;
  if (c < 2) return;
  const int keys = c + Shared::kStages - 2, queries = c + Shared::kQueryStages - 2;
  feed_chunks(maps, s, p, keys, keys + 1, queries, queries + 1, 0, 0);
}
// What it makes room for within chunk c - 1: o leaves from v's buffer a chunk later.
template <int kK, int kV, Walk kWalk>
__device__ __forceinline__ void feed_with_output(const ScanMaps& maps, ScanShared<kK, kV, kWalk>& s,
                                                 const Place& p, int c) {
  if (c >= ScanShared<kK, kV, kWalk>::kValueStages) feed_chunks(maps, s, p, 0, 0, 0, 0, c, c + 1);
}

// Where the backward's workspaces hold chunk `chunk` of a place. Tiles lie there as in shared
// memory.
__device__ __forceinline__ int64_t workspace_place(const ChunkArgs& a, const Place& p, int chunk) {
  return (int64_t{p.slot} + chunk) * a.value_heads + p.hv;
}

}  // namespace efla::cuda::sm90
