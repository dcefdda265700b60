// What stands beside the warpgroups of the state in the scan: the auxiliary warpgroup's walk over
// the chunks, made of prepare.cuh's pieces; what takes its place where chunks have been prepared
// before; and the kernel that prepares them.
#pragma once

#include "efla/kernels/cuda/sm90/scan_shared.cuh"

namespace efla::cuda::sm90 {

// Zeroes rows of a chunk from `tokens` on: what lies behind the sequence may be anything, NaN too.
template <int kTiles, typename Tiles>
__device__ __forceinline__ void clear_rows(Tiles& tiles, int tokens, int thread) {
  if (thread >= tokens && thread < kC) zero_row(tiles[0], kTiles, thread);
}

// The auxiliary warpgroup. Shared is a ScanShared, or a PrepareShared, which has no walk beside it.
template <typename T, int kK, bool kErase, bool kDecay, typename Shared>
__device__ __forceinline__ void prepare(const ChunkArgs& a, Shared& s, const Place& p,
                                        bool values) {
  constexpr bool kAlone = Shared::kAlone, kMakesScores = Shared::template kMakesScores<kDecay>;
  int thread = threadIdx.x % kWarpgroup;
  // Above the diagonal the triangles stay zero.
  for (int i = thread; i < static_cast<int>(sizeof(s.scratch.inverse)) / 16; i += kWarpgroup) {
    reinterpret_cast<uint4*>(s.scratch.inverse)[i] = make_uint4(0, 0, 0, 0);
  }
  for (int i = thread; i < static_cast<int>(sizeof(s.inverse)) / 16; i += kWarpgroup) {
    reinterpret_cast<uint4*>(s.inverse)[i] = make_uint4(0, 0, 0, 0);
  }
  for (int i = thread; i < static_cast<int>(sizeof(s.scores)) / 16; i += kWarpgroup) {
    reinterpret_cast<uint4*>(s.scores)[i] = make_uint4(0, 0, 0, 0);
  }
  Ring<Shared::kStages> ring;
  Ring<2> out;
  const int row = static_cast<int>(p.row), hv = p.hv;
  int token = static_cast<int>(p.begin), left = chunks_of(p) > 0 ? static_cast<int>(p.tokens) : 0;
  int chunk = 0;  // for kKeep
  read_token<kDecay>(a, s.scratch, 0, row, token + thread, hv, thread, thread < left);
  float kk[32];
  // Starts K K^T of the ring's chunk.
  const auto start = [&](int tokens) {
    unsigned char* k = s.k[ring.index][0];
    s.keys_full[ring.index].wait(ring.round);
    if (tokens < kC) {
      clear_rows<kK / 64>(s.k[ring.index], tokens, thread);
      if (Shared::kScores) clear_rows<kK / 64>(s.q[ring.index], tokens, thread);
      fence_async_proxy();
      sync_prepare();
    }
    multiply_keys<T, kK>(kk, k, k);
  };
  if (left > 0) {
    start(min(kC, left));
    wait_copies<0>();
    wait_products<0>();
    pin(kk);
  }
  sync_prepare();
#pragma unroll 1
  while (left > 0) {
    // Or the addresses of all that follows are kept across chunks, and spill.
    hide_index<kWarpgroup>(thread);
    const int i = ring.index, j = out.index, square = j % Shared::kSquares;
    const int tokens = min(kC, left);
    left -= kC;
    token += kC;
    if constexpr (kAlone) {
      if (thread == 0) wait_stores_read<0>();  // all know behind make_scalars' barrier
    } else {
      s.triangles_free[j].wait(out.round ^ 1);
      if (values && tokens < kC) {
        const int n = Shared::kKeep ? chunk % 2 : i;
        s.values_full[n].wait(Shared::kKeep ? chunk / 2 & 1 : ring.round);
        clear_rows<Shared::kGroups>(s.v[n], tokens, thread);
      }
    }
    unsigned char* k = s.k[i][0];
    unsigned char* q = s.q[Shared::kScores ? i : 0][0];
    const RowScalars rows = make_scalars<T, kK, kDecay, Shared::kScores>(
        a, s.scratch, kk, k, q, s.scalars[square], j, tokens,
        Shared::kScores && a.qk_l2norm && (!kAlone || a.scores), thread);
    if constexpr (Shared::kScores && !kMakesScores) s.scalars_ready[j].arrive();
    float kq[32];
    if constexpr (kMakesScores && !kAlone) multiply_keys<T, kK>(kq, k, q);
    // For the warps with the least of L_hat.
    read_token<kDecay>(a, s.scratch, j ^ 1, row, token + thread, hv, thread, thread < left);
    if constexpr (kErase) store_lower<kDecay>(s.scratch, s.scratch.factors[j], rows, kk, thread);
    if constexpr (kAlone) {
      if (a.scores) {
        multiply_keys<T, kK>(kq, k, q);
        wait_products<0>();
        pin(kq);
        store_scores<T, kDecay, kC>(s.scratch.factors[j], kq, s.scores[square], 0, thread);
      }
      arrive_warp(s.keys_free[i]);
    } else if constexpr (kMakesScores) {
      wait_products<0>();
      pin(kq);
      store_scores<T, kDecay, kC>(s.scratch.factors[j], kq, s.scores[square], 0, thread);
    }
    ring.advance();
    wait_copies<0>();  // the next chunk's tokens are there behind the barrier
    sync_prepare();
    // The next chunk's K K^T runs while the rest of this one is made.
    const auto begin_next = [&] {
      if (left > 0) start(min(kC, left));
    };
    if constexpr (kErase) {
      invert<T>(s.scratch, s.inverse[square], thread, begin_next);
    } else {
      begin_next();
    }
    fence_async_proxy();
    if constexpr (!kAlone) s.ready[j].arrive();
    if constexpr (Shared::kKeep) {
      if (thread == 0) wait_stores_read<0>();  // those of the chunk before, whose buffers are next
      sync_prepare();
      if (thread == 0) {
        constexpr int kTile = Shared::kTile;
        const int64_t place = workspace_place(a, p, chunk);
        if (kErase) {
          store_bytes(static_cast<unsigned char*>(a.inverse) + place * kTile, s.inverse[square],
                      kTile);
        }
        if (!kAlone || a.scores) {
          store_bytes(static_cast<unsigned char*>(a.scores) + place * kTile, s.scores[square],
                      kTile);
        }
        store_bytes(a.scalars + place * kScalarRows * kC, &s.scalars[square], sizeof(ChunkScalars));
        commit_stores();
      }
      ++chunk;
    }
    out.advance();
    wait_products<0>();  // the compiler keeps no products in flight across iterations
    pin(kk);
  }
  if (Shared::kKeep && thread == 0) wait_stores<0>();
}

// In its place where the chunks have been prepared: brings in what a walk without output needs.
template <bool kErase, int kK, int kV, Walk kWalk>
__device__ __forceinline__ void load_prepared(const ChunkArgs& a, ScanShared<kK, kV, kWalk>& s,
                                              const Place& p, bool values) {
  using Shared = ScanShared<kK, kV, kWalk>;
  constexpr int kTile = Shared::kTile;
  constexpr int kBytes = kErase * kTile + static_cast<int>(sizeof(ChunkScalars));
  const int thread = threadIdx.x % kWarpgroup, chunks = chunks_of(p);
  const auto wait = [&](int c) { s.triangles_free[c % 2].wait((c / 2 & 1) ^ 1); };
  const auto load = [&](int c) {
    const int64_t place = workspace_place(a, p, c);
    Barrier& full = s.ready[c % 2];
    full.arrive_expecting(kBytes);
    if (kErase) {
      load_bytes(s.inverse[c % 2], static_cast<unsigned char*>(a.inverse) + place * kTile, kTile,
                 full);
    }
    load_bytes(&s.scalars[c % 2], a.scalars + place * kScalarRows * kC, sizeof(ChunkScalars), full);
  };
  const int whole = chunks > 0 ? static_cast<int>(p.tokens / kC) : 0;
  if (thread == 0) {
    for (int c = 0; c < whole; ++c) wait(c), load(c);
  }
  if (whole == chunks) return;
  // A part of a chunk comes last. Until one thread is there nobody else may look at a barrier,
  // whose parity could be that of another round.
  if (thread == 0) wait(whole);
  sync_prepare();
  const int i = whole % Shared::kStages, tokens = static_cast<int>(p.tokens % kC);
  s.keys_full[i].wait(whole / Shared::kStages & 1);
  clear_rows<kK / 64>(s.k[i], tokens, thread);
  if (values) {
    const int n = whole % Shared::kValueStages;
    s.values_full[n].wait(whole / Shared::kValueStages & 1);
    clear_rows<Shared::kGroups>(s.v[n], tokens, thread);
  }
  fence_async_proxy();
  sync_prepare();
  if (thread == 0) load(whole);
}

inline constexpr int kPrepareThreads = kWarpgroup + 32;

// Prepares chunks for walks that follow: what they need twice or more is then made once, and not in
// turn with the states. args.part_tokens are those of a block, `part_tokens` those of the walks'
// parts, the last of which without scores (that is, for the forward) needs nothing.
template <typename T, int kK, bool kErase, bool kDecay>
__global__ void __launch_bounds__(kPrepareThreads, 2)
    prepare_kernel(const __grid_constant__ ScanMaps maps, const __grid_constant__ ScanArgs args,
                   const int64_t part_tokens) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& s = *reinterpret_cast<PrepareShared<kK>*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < s.kStages; ++i) s.keys_full[i].init(1), s.keys_free[i].init(4);
    fence_barrier_init();
  }
  __syncthreads();
  const ChunkArgs& a = args.common;
  const Place p = find_place(args, static_cast<int>(a.columns));
  if (p.sequence < 0) return;
  const int64_t first = a.cu_seqlens ? a.cu_seqlens[p.sequence] : 0;
  const int64_t tokens = a.cu_seqlens ? a.cu_seqlens[p.sequence + 1] - first : a.tokens;
  if (!a.scores && p.begin - first >= (tokens - 1) / part_tokens * part_tokens) return;
  if (threadIdx.x < kWarpgroup) {
    prepare<T, kK, kErase, kDecay>(args.common, s, p, false);
  } else if (threadIdx.x == kWarpgroup) {
    feed_keys<kK>(maps, s, p, a.scores != nullptr);
  }
}

}  // namespace efla::cuda::sm90
