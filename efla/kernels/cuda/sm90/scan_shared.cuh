// What the roles of the scan (scan.cuh) share: shared memory, its rings of buffers, who feeds them.
#pragma once

#include "efla/kernels/cuda/sm90/prepare.cuh"

namespace efla::cuda::sm90 {

// What a walk is for.
enum class Walk {
  kOutput,   // o and the final state
  kAdvance,  // the state after each part, and the part's transition (advance_share.cuh)
  kKeep,  // for the backward: the state before each chunk, U, and what the chunk's triangles hold
};

// What a block walks, for kAdvance one after another.
struct Run {
  Place place;
  bool values = true;  // else it makes a transition; the same for all of a block
  bool resumes = false, breaks_off = false;  // begins, ends within a part
};

inline constexpr int kMostRuns = 32;  // of a block

// Named barriers of the warpgroups that walk, beside kPrepareBarrier (1) and kInvertBarrier (7):
// one of each warpgroup's own (2, 3), one of both, and in kAdvance one that each waits at for its
// turn (5, 6).
inline constexpr int kKeepBarrier = 2, kShortenBarrier = 4, kTurnBarrier = 5;

template <int kK, int kV, Walk kWalk>
struct ScanShared {
  static constexpr int kGroups = kV / 64;
  static constexpr int kTile = kC * 128;
  static constexpr bool kOutput = kWalk == Walk::kOutput, kKeep = kWalk == Walk::kKeep;
  static constexpr bool kScores = kOutput || kKeep;
  // Buffers. Chunks are prepared from k up to three ahead; q is wanted later, and done with sooner.
  static constexpr int kKeyStages = kKeep ? 3 : 4, kQueryStages = 3;
  static constexpr int kValueStages = kScores ? 2 : 3, kTriangleStages = kScores ? 2 : 4;
  static constexpr int kQueryRows = 8;  // o takes its factors a chunk later

  unsigned char k[kKeyStages][kK / 64][kTile];
  unsigned char q[kScores ? kQueryStages : 1][kScores ? kK / 64 : 1][kScores ? kTile : 1024];
  unsigned char v[kValueStages][kGroups][kTile];  // later U
  unsigned char o[kOutput ? kGroups : 1][kOutput ? kTile : 1024];
  unsigned char kept[kKeep ? kGroups : 1][kKeep ? kK / 64 : 1][kKeep ? kTile : 1024];  // S^T
  unsigned char inverse[kTriangleStages][kTile];
  unsigned char scores[kScores ? 2 : 1][kScores ? kTile : 1024];
  PrepareScratch<2> scratch;
  ChunkScalars scalars[kKeyStages];
  float query[kOutput ? kQueryRows : 1][kC];             // in their place of those in `scalars`
  Barrier keys_full[kKeyStages], keys_free[kKeyStages];  // k; scalars
  Barrier queries_full[kQueryStages], queries_free[kQueryStages];  // q
  Barrier values_full[kValueStages], values_free[kValueStages];    // v
  Barrier output_full[kGroups], output_free[kGroups];              // o
  // L_hat and the scalars, of as many chunks as k, for the walk looks at it late; L_hat.
  Barrier lower_full[kKeyStages], lower_free[2];
  Barrier ready[kTriangleStages], triangles_free[kTriangleStages];  // inverse and scalars
  Barrier scores_ready[2];
  Run runs[kScores ? 1 : kMostRuns];
  int run_count;
};

// Of prepare_kernel, in which one warpgroup prepares and inverts chunks for several walks.
template <int kK, bool kWithScores>
struct PrepareShared {
  static constexpr int kTile = kC * 128;
  static constexpr int kKeyStages = 2, kQueryStages = 2;
  static constexpr bool kScores = kWithScores;

  unsigned char k[kKeyStages][kK / 64][kTile];
  unsigned char q[kScores ? kQueryStages : 1][kScores ? kK / 64 : 1][kScores ? kTile : 1024];
  unsigned char inverse[kTile], scores[kScores ? kTile : 1024];
  PrepareScratch<1> scratch;
  ChunkScalars scalars;
  Barrier keys_full[kKeyStages], keys_free[kKeyStages];
  Barrier queries_full[kQueryStages], queries_free[kQueryStages];
};

// Lane 0 of a warp arrives for all its lanes.
__device__ __forceinline__ void arrive_warp(Barrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier.arrive();
}

// The same for a buffer that ordinary loads have read: the copy engine must not refill it before
// they are done, which takes a fence beside the barrier. (Without it loads that had to wait behind
// slow ones to global memory read what was copied next; seen where four processes shared a device.)
__device__ __forceinline__ void give_back(Barrier& barrier) {
  fence_async_proxy();
  arrive_warp(barrier);
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

// A chunk's place in such a ring, for those who have no register for one.
template <int kSize>
__device__ __forceinline__ Ring<kSize> ring_of(int chunk) {
  const uint32_t n = chunk;
  return {static_cast<int>(n % kSize), n / kSize & 1};
}

// Whether the warpgroup that inverts makes P_hat, in the place of the one that prepares chunks,
// whose scalars are longer with decay.
template <bool kErase, bool kDecay, Walk kWalk>
inline constexpr bool kInverterScores = kErase&& kDecay&& kWalk == Walk::kOutput;

// Whether factors of tokens are taken out of the products. Without decay all are of rows or
// columns:
//   U^T = e (v^T w / e - S^T K^T) A_hat^T k_hat / k        O^T = (S^T Q^T + U^T tril(Q K^T)^T) q
// with U as S takes it: P_hat's tile holds tril(Q K^T)^T, `write` w / e, and what subtracts S^T K^T
// starts from v. Where keys are mild (is_mild()), k_hat / k is in A_hat and `erase`. Half could
// overflow.
// With decay the same holds of S_t / E_t, where E_t is the decay from some token on up to t: it
// obeys the rule without decay with w / E_t in the place of w, and E_t q_t in that of q_t. So S is
// stored without what it owes (OwedDecay), and pays before E_t becomes too small. Chunks that are
// not mild, in their keys or because they decay by more than there is room for, have the decay
// inside in L_hat and P_hat, and take over what is owed.
template <typename T, bool kErase, bool kDecay, Walk kWalk>
inline constexpr bool kFoldedFactors = kIsBfloat16<T> &&
                                       (kErase || !kDecay) && kWalk == Walk::kOutput;

template <bool kInverterReads, typename Shared>
__device__ __forceinline__ void init_barriers(Shared& s, bool prepared) {
  if (threadIdx.x == 0) {
    const int walkers = 4 * Shared::kGroups;  // warps
    // Warps beside the walk's that read k.
    const int makers = Shared::kScores && !prepared ? 4 * (1 + kInverterReads) : 0;
    for (int i = 0; i < Shared::kKeyStages; ++i) {
      s.keys_full[i].init(1);
      s.keys_free[i].init(walkers + makers);
      s.lower_full[i].init(kWarpgroup);
    }
    for (int i = 0; i < Shared::kQueryStages; ++i) {
      s.queries_full[i].init(1);
      s.queries_free[i].init((Shared::kOutput ? walkers : 0) + 4);
    }
    for (int i = 0; i < Shared::kValueStages; ++i) {
      s.values_full[i].init(1);
      s.values_free[i].init(Shared::kKeep ? Shared::kGroups : walkers);
    }
    for (int i = 0; i < Shared::kGroups; ++i) s.output_full[i].init(4), s.output_free[i].init(1);
    for (int i = 0; i < Shared::kTriangleStages; ++i) {
      s.ready[i].init(prepared ? 1 : kWarpgroup);
      s.triangles_free[i].init(walkers);
    }
    for (int i = 0; i < 2; ++i) s.lower_free[i].init(kWarpgroup), s.scores_ready[i].init(4);
    fence_barrier_init();
  }
}

// Brings a chunk's tiles [kC, 64 kTiles] of one head into a buffer whose round that is, once it is
// free. A whole warp calls it.
template <int kTiles>
__device__ __forceinline__ void feed(const CUtensorMap& map,
                                     unsigned char (&tiles)[kTiles][kC * 128], Barrier& full,
                                     Barrier& free, uint32_t round, int column, int head, int token,
                                     int row) {
  if (!elect_one()) return;
  free.wait(round ^ 1);
  full.arrive_expecting(sizeof(tiles));
  for (int j = 0; j < kTiles; ++j) {
    load_box(tiles[j], map, full, column + 64 * j, head, token, row);
  }
}

// The same for what a chunk needs.
template <typename Shared>
struct Feeder {
  const ScanMaps& maps;
  Shared& s;
  const Place& p;

  __device__ __forceinline__ int token(int chunk) const {
    return static_cast<int>(p.begin) + chunk * kC;
  }
  __device__ __forceinline__ void keys(int chunk) const {
    const auto [i, round] = ring_of<Shared::kKeyStages>(chunk);
    feed(maps.k, s.k[i], s.keys_full[i], s.keys_free[i], round, 0, p.hk, token(chunk),
         static_cast<int>(p.row));
  }
  __device__ __forceinline__ void queries(int chunk) const {
    const auto [i, round] = ring_of<Shared::kQueryStages>(chunk);
    if constexpr (Shared::kScores) {
      feed(maps.q, s.q[i], s.queries_full[i], s.queries_free[i], round, 0, p.hk, token(chunk),
           static_cast<int>(p.row));
    }
  }
  __device__ __forceinline__ void values(int chunk) const {
    const auto [i, round] = ring_of<Shared::kValueStages>(chunk);
    int column = p.column0;
    hide(column);  // or the second one's column is kept, in a register too many
    feed(maps.v, s.v[i], s.values_full[i], s.values_free[i], round, column, p.hv, token(chunk),
         static_cast<int>(p.row));
  }
};

// Where the backward's workspaces hold chunk `chunk` of a place. Tiles lie there as in shared
// memory.
__device__ __forceinline__ int64_t workspace_place(const ChunkArgs& a, const Place& p, int chunk) {
  return (int64_t{p.slot} + chunk) * a.value_heads + p.hv;
}

}  // namespace efla::cuda::sm90
