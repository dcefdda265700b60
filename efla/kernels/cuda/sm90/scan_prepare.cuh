// What stands beside the warpgroups of the state in the scan, made of prepare.cuh's pieces: one
// that prepares chunks and one that inverts; what takes their place where chunks have been prepared
// before; and the kernel that prepares them.
#pragma once

#include "efla/kernels/cuda/sm90/scan_shared.cuh"

namespace efla::cuda::sm90 {

// Zeroes rows of a chunk from `tokens` on: what lies behind the sequence may be anything, NaN too.
template <int kTiles, typename Tiles>
__device__ __forceinline__ void clear_rows(Tiles& tiles, int tokens, int thread) {
  if (thread >= tokens && thread < kC) zero_row(tiles[0], kTiles, thread);
}

template <typename Tiles>
__device__ __forceinline__ void zero_tiles(Tiles& tiles, int thread) {
  for (int i = thread; i < static_cast<int>(sizeof(tiles)) / 16; i += kWarpgroup) {
    reinterpret_cast<uint4*>(&tiles)[i] = make_uint4(0, 0, 0, 0);
  }
}

// Zeroes what lies behind the sequence in v's tile of the chunk.
template <typename Shared>
__device__ __forceinline__ void clear_values(Shared& s, const ChunkCount& n, int tokens,
                                             int thread) {
  s.triangles_free[n.buffer<2>()].wait(n.round<2>() ^ 1);  // or v could be two rounds behind
  const int i = n.buffer<Shared::kValueStages>();
  s.values_full[i].wait(n.round<Shared::kValueStages>());
  clear_rows<Shared::kGroups>(s.v[i], tokens, thread);
}

// Halves [first, last) of P_hat, 32 columns each, from the tiles k and q of a chunk, to buffer j.
template <typename T, int kK, bool kDecay, typename Shared>
__device__ __forceinline__ void make_scores(Shared& s, const unsigned char* k,
                                            const unsigned char* q, int j, int first, int last,
                                            int thread) {
#pragma unroll 1
  for (int h = first; h < last; ++h) {
    float kq[16];
    multiply_keys<T, kK, 32>(kq, k, q + h * 32 * 128);
    wait_products<0>();
    pin(kq);
    store_scores<T, kDecay, 32>(s.scratch.factors[j], kq, s.scores[j], 2 * h, thread);
  }
  fence_async_proxy();
}

// The warpgroup that feeds, and makes a chunk's scalars, L_hat for the one that inverts it, and
// what falls to it of P_hat.
template <typename T, int kK, int kV, bool kErase, bool kDecay, Walk kWalk>
__device__ __forceinline__ void feed_and_prepare(const ScanMaps& maps, const ChunkArgs& a,
                                                 ScanShared<kK, kV, kWalk>& s, const Place& p) {
  using Shared = ScanShared<kK, kV, kWalk>;
  constexpr int kHalves = kPreparedHalves<kErase, kWalk>;
  int thread = threadIdx.x % kWarpgroup;
  constexpr bool kFeeds = kFirstFeeds<kWalk> || !kErase;
  if constexpr (kFeeds) feed_first(maps, s, p);
  zero_tiles(s.scores, thread);  // below the diagonal they stay zero
  ChunkCount n;
  const int row = static_cast<int>(p.row), hv = p.hv;
  int token = static_cast<int>(p.begin), left = chunks_of(p) > 0 ? static_cast<int>(p.tokens) : 0;
  read_token<kDecay>(a, s.scratch, 0, row, token + thread, hv, thread, thread < left);
#pragma unroll 1
  while (left > 0) {
    // Or the addresses of all that follows are kept across chunks, and spill.
    hide_index<kWarpgroup>(thread);
    const int i = n.buffer<Shared::kStages>(), j = n.buffer<2>();
    const int qi = n.buffer<Shared::kQueryStages>();
    const uint32_t round = n.round<2>(), query_round = n.round<Shared::kQueryStages>();
    const int tokens = min(kC, left);
    left -= kC;
    token += kC;
    unsigned char *k = s.k[i][0], *q = s.q[qi][0];
    wait_copies<0>();
    s.keys_full[i].wait(n.round<Shared::kStages>());
    if (tokens < kC || a.qk_l2norm) s.queries_full[qi].wait(query_round);
    if (tokens < kC) {
      clear_rows<kK / 64>(s.k[i], tokens, thread);
      clear_rows<kK / 64>(s.q[qi], tokens, thread);
      if constexpr (!kErase) {
        feed_with_output(maps, s, p, n.chunk);
        clear_values(s, n, tokens, thread);
      }
      fence_async_proxy();
    }
    if (Shared::kKeep && thread == 0) wait_stores_read<1>();  // the buffers of two chunks ago
    sync_prepare();
    float kk[32];
    multiply_keys<T, kK>(kk, k, k);
    read_token<kDecay>(a, s.scratch, j ^ 1, row, token + thread, hv, thread, thread < left);
    wait_products<0>();
    pin(kk);
    if constexpr (kErase) s.lower_free[j].wait(round ^ 1);
    const RowScalars rows = make_scalars<T, kK, kDecay, true>(a, s.scratch, kk, k, q, s.scalars[i],
                                                              j, tokens, a.qk_l2norm, thread);
    if constexpr (kErase) {
      store_lower<kDecay>(s.scratch.lower[j], s.scratch.factors[j], rows, kk, thread);
      s.lower_full[j].arrive();
    }
    // kKeep's walk takes no scores: it may be done with this chunk by now.
    if constexpr ((Shared::kOutput && kHalves > 0) || !kErase) {
      s.triangles_free[j].wait(round ^ 1);
    }
    if constexpr (!kErase) s.ready[j].arrive();
    if constexpr (kFeeds) feed_with_triangles(maps, s, p, n.chunk);
    if constexpr (kHalves > 0) {
      s.queries_full[qi].wait(query_round);
      make_scores<T, kK, kDecay>(s, k, q, j, 0, kHalves, thread);
      arrive_warp(s.queries_free[qi]);
    }
    arrive_warp(s.keys_free[i]);
    if constexpr (Shared::kKeep) {
      sync_prepare();
      if (thread == 0) {
        const int64_t place = workspace_place(a, p, n.chunk);
        store_bytes(static_cast<unsigned char*>(a.scores) + place * Shared::kTile, s.scores[j],
                    Shared::kTile);
        store_bytes(a.scalars + place * kScalarRows * kC, &s.scalars[i], sizeof(ChunkScalars));
        commit_stores();
      }
    } else if constexpr (kHalves > 0) {
      arrive_warp(s.scores_ready[j]);
    }
    if constexpr (kFeeds) {
      if (kErase || tokens == kC) feed_with_output(maps, s, p, n.chunk);
    }
    n.advance();
  }
  if (Shared::kKeep && thread == 0) wait_stores<0>();
}

// The warpgroup that inverts what feed_and_prepare() leaves, and makes the rest of P_hat.
template <typename T, int kK, int kV, bool kErase, bool kDecay, Walk kWalk>
__device__ __forceinline__ void invert_all(const ScanMaps& maps, const ChunkArgs& a,
                                           ScanShared<kK, kV, kWalk>& s, const Place& p) {
  using Shared = ScanShared<kK, kV, kWalk>;
  constexpr int kHalves = kPreparedHalves<kErase, kWalk>;
  int thread = threadIdx.x % kWarpgroup;
  if constexpr (!kFirstFeeds<kWalk>) feed_first(maps, s, p);
  zero_tiles(s.scratch.inverse, thread);  // above the diagonal they stay zero
  zero_tiles(s.inverse, thread);
  const int chunks = chunks_of(p), rest = static_cast<int>(p.tokens % kC);
  ChunkCount n;
#pragma unroll 1
  for (; n.chunk < chunks; n.advance()) {
    hide_index<kWarpgroup>(thread);
    const int j = n.buffer<2>();
    s.triangles_free[j].wait(n.round<2>() ^ 1);
    if constexpr (!kFirstFeeds<kWalk>) {
      feed_with_triangles(maps, s, p, n.chunk);
      if (rest > 0 && n.chunk == chunks - 1) feed_with_output(maps, s, p, n.chunk);
    }
    s.lower_full[j].wait(n.round<2>());
    sync_invert();  // the chunk before is done in all warps
    invert<T>(s.scratch.lower[j], s.scratch.inverse, s.inverse[j], thread, [] {});
    if (rest > 0 && n.chunk == chunks - 1) clear_values(s, n, rest, thread);
    fence_async_proxy();
    s.ready[j].arrive();
    if constexpr (!kFirstFeeds<kWalk>) {
      if (rest == 0 || n.chunk < chunks - 1) feed_with_output(maps, s, p, n.chunk);
    }
    if constexpr (kHalves < 2) {
      hide_index<kWarpgroup>(thread);
      const int i = n.buffer<Shared::kStages>(), qi = n.buffer<Shared::kQueryStages>();
      s.queries_full[qi].wait(n.round<Shared::kQueryStages>());
      make_scores<T, kK, kDecay>(s, s.k[i][0], s.q[qi][0], j, kHalves, 2, thread);
      arrive_warp(s.scores_ready[j]);
      arrive_warp(s.keys_free[i]);
      arrive_warp(s.queries_free[qi]);
    }
    arrive_warp(s.lower_free[j]);  // and the factors
    if constexpr (Shared::kKeep) {
      if (thread == 0) wait_stores_read<0>();  // that of the chunk before, whose buffer is next
      sync_invert();
      if (thread == 0) {
        store_bytes(
            static_cast<unsigned char*>(a.inverse) + workspace_place(a, p, n.chunk) * Shared::kTile,
            s.inverse[j], Shared::kTile);
        commit_stores();
      }
    }
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
    load_bytes(&s.scalars[c % Shared::kStages], a.scalars + place * kScalarRows * kC,
               sizeof(ChunkScalars), full);
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

// All of it by one warpgroup, chunk after chunk, to the workspace.
template <typename T, int kK, bool kErase, bool kDecay>
__device__ __forceinline__ void prepare_all(const ChunkArgs& a, PrepareShared<kK>& s,
                                            const Place& p) {
  int thread = threadIdx.x % kWarpgroup;
  zero_tiles(s.scratch.inverse, thread);
  zero_tiles(s.inverse, thread);
  zero_tiles(s.scores, thread);
  Ring<PrepareShared<kK>::kStages> ring;
  const int row = static_cast<int>(p.row), hv = p.hv;
  int token = static_cast<int>(p.begin), left = chunks_of(p) > 0 ? static_cast<int>(p.tokens) : 0;
  int chunk = 0;
  read_token<kDecay>(a, s.scratch, 0, row, token + thread, hv, thread, thread < left);
  float kk[32];
  // Starts K K^T of the ring's chunk.
  const auto start = [&](int tokens) {
    unsigned char* k = s.k[ring.index][0];
    s.keys_full[ring.index].wait(ring.round);
    if (tokens < kC) {
      clear_rows<kK / 64>(s.k[ring.index], tokens, thread);
      clear_rows<kK / 64>(s.q[ring.index], tokens, thread);
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
    hide_index<kWarpgroup>(thread);  // as in prepare()
    const int i = ring.index, j = chunk % 2;
    const int tokens = min(kC, left);
    left -= kC;
    token += kC;
    if (thread == 0) wait_stores_read<0>();  // all know behind make_scalars' barrier
    unsigned char *k = s.k[i][0], *q = s.q[i][0];
    const RowScalars rows = make_scalars<T, kK, kDecay, true>(
        a, s.scratch, kk, k, q, s.scalars, j, tokens, a.qk_l2norm && a.scores, thread);
    // For the warps with the least of L_hat.
    read_token<kDecay>(a, s.scratch, j ^ 1, row, token + thread, hv, thread, thread < left);
    if constexpr (kErase) {
      store_lower<kDecay>(s.scratch.lower[0], s.scratch.factors[j], rows, kk, thread);
    }
    if (a.scores) {
      float kq[32];
      multiply_keys<T, kK>(kq, k, q);
      wait_products<0>();
      pin(kq);
      store_scores<T, kDecay, kC>(s.scratch.factors[j], kq, s.scores, 0, thread);
    }
    arrive_warp(s.keys_free[i]);
    ring.advance();
    wait_copies<0>();  // the next chunk's tokens are there behind the barrier
    sync_prepare();
    // The next chunk's K K^T runs while the rest of this one is made.
    const auto begin_next = [&] {
      if (left > 0) start(min(kC, left));
    };
    if constexpr (kErase) {
      invert<T>(s.scratch.lower[0], s.scratch.inverse, s.inverse, thread, begin_next);
    } else {
      begin_next();
    }
    fence_async_proxy();
    sync_prepare();
    if (thread == 0) {
      constexpr int kTile = PrepareShared<kK>::kTile;
      const int64_t place = workspace_place(a, p, chunk);
      if (kErase) {
        store_bytes(static_cast<unsigned char*>(a.inverse) + place * kTile, s.inverse, kTile);
      }
      if (a.scores) {
        store_bytes(static_cast<unsigned char*>(a.scores) + place * kTile, s.scores, kTile);
      }
      store_bytes(a.scalars + place * kScalarRows * kC, &s.scalars, sizeof(ChunkScalars));
      commit_stores();
    }
    ++chunk;
    wait_products<0>();  // the compiler keeps no products in flight across iterations
    pin(kk);
  }
  if (thread == 0) wait_stores<0>();
}

// Its feeder: k and, where they are wanted, queries, behind one barrier.
template <int kK>
__device__ __forceinline__ void feed_pairs(const ScanMaps& maps, PrepareShared<kK>& s,
                                           const Place& p, bool queries) {
  const int chunks = chunks_of(p), row = static_cast<int>(p.row);
  int token = static_cast<int>(p.begin);
  Ring<PrepareShared<kK>::kStages> ring;
  for (int c = 0; c < chunks; ++c, token += kC, ring.advance()) {
    const int i = ring.index;
    s.keys_free[i].wait(ring.round ^ 1);
    s.keys_full[i].arrive_expecting((queries ? 2 : 1) * kK * kC * 2);
    for (int j = 0; j < kK / 64; ++j) {
      load_box(s.k[i][j], maps.k, s.keys_full[i], 64 * j, p.hk, token, row);
      if (queries) load_box(s.q[i][j], maps.q, s.keys_full[i], 64 * j, p.hk, token, row);
    }
  }
}

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
    prepare_all<T, kK, kErase, kDecay>(args.common, s, p);
  } else if (threadIdx.x == kWarpgroup) {
    feed_pairs(maps, s, p, a.scores != nullptr);
  }
}

}  // namespace efla::cuda::sm90
