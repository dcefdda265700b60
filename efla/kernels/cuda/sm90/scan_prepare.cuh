// What stands beside the warpgroups of the state in the scan, made of prepare.cuh's pieces: one
// that prepares chunks and one that inverts; what takes their place where chunks have been prepared
// before; and the kernel that prepares them.
#pragma once

#include "efla/kernels/cuda/sm90/advance_share.cuh"

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

// The same for v of chunk c, once it is there; c - 2 is done, or v could be two rounds behind.
template <typename Shared>
__device__ __forceinline__ void clear_values(Shared& s, int c, int tokens, int thread) {
  constexpr int kStages = Shared::kValueStages;
  s.values_full[c % kStages].wait(c / kStages & 1);
  clear_rows<Shared::kGroups>(s.v[c % kStages], tokens, thread);
}

// P_hat of the chunk in buffers i (k, scalars), qi (q) and j, kColumns at a time; `wait` is called
// before it is written, while a product runs.
template <typename T, int kK, bool kDecay, bool kFolded, int kColumns, typename Shared,
          typename Wait>
__device__ __forceinline__ void make_scores(Shared& s, int i, int qi, int j, bool wide, int thread,
                                            Wait wait) {
  const auto& key_out = s.scalars[i].key_out;
#pragma unroll 1
  for (int column = 0; column < kC; column += kColumns) {
    float kq[kColumns / 2];
    multiply_keys<T, kK, kColumns>(kq, s.k[i][0], s.q[qi][0] + column * 128);
    wait();
    wait_products<0>();
    pin(kq);
    if (kDecay && (!kFolded || wide)) {
      store_scores<T, true, kColumns, kFolded>(s.scratch.factors[j], key_out, kq, s.scores[j],
                                               column / 16, thread);
    } else {
      store_scores<T, false, kColumns, kFolded>(s.scratch.factors[j], key_out, kq, s.scores[j],
                                                column / 16, thread);
    }
  }
  fence_async_proxy();
}

// The warpgroup that makes a chunk's scalars, L_hat for the one that inverts it, and P_hat unless
// that one does (kInverterScores).
template <typename T, int kK, int kV, bool kErase, bool kDecay, Walk kWalk>
__device__ __forceinline__ void prepare(const ChunkArgs& a, ScanShared<kK, kV, kWalk>& s,
                                        const Place& p) {
  using Shared = ScanShared<kK, kV, kWalk>;
  constexpr bool kScores = !kInverterScores<kErase, kDecay, kWalk>;
  constexpr bool kFolded = kFoldedFactors<T, kErase, kDecay, kWalk>;
  int thread = threadIdx.x % kWarpgroup;
  const int warp = agreed(thread / 32);
  zero_tiles(s.scores, thread);  // below the diagonal they stay zero
  OwedDecay owed;
  const int all = chunks_of(p) > 0 ? static_cast<int>(p.tokens) : 0;
  TokenSource<kDecay> source(a, p);
  source.read(a, s.scratch, 0, all, thread);
#pragma unroll 1
  for (int done = 0; done < all; done += kC) {
    // Or the addresses of all that follows are kept across chunks, and spill.
    hide_index<kWarpgroup>(thread);
    const int chunk = done / kC, tokens = min(kC, all - done);
    const auto ring = ring_of<Shared::kKeyStages>(chunk);
    const auto query_ring = ring_of<Shared::kQueryStages>(chunk);
    const auto out = ring_of<2>(chunk);
    const int i = ring.index, qi = query_ring.index, j = out.index;
    wait_copies<0>();
    s.keys_full[i].wait(ring.round);
    if (tokens < kC || a.qk_l2norm) s.queries_full[qi].wait(query_ring.round);
    if (tokens < kC) {
      clear_rows<kK / 64>(s.k[i], tokens, thread);
      clear_rows<kK / 64>(s.q[qi], tokens, thread);
      if (!kErase) {  // else he who says that A_hat is ready does it, or folded the walk
        s.triangles_free[j].wait(out.round ^ 1);
        clear_values(s, chunk, tokens, thread);
      }
      fence_async_proxy();
    }
    // The buffers of two chunks ago. (elect_one() would cost registers that are not there.)
    if (Shared::kKeep && thread == 0) wait_stores_read<1>();
    if (Shared::kKeep || tokens < kC) {
      sync_prepare();
    } else {
      __syncwarp();
    }
    float kk[32];
    multiply_keys<T, kK>(kk, s.k[i][0], s.k[i][0]);
    source.read(a, s.scratch, j ^ 1, all - done - kC, thread);
    wait_products<0>();
    pin(kk);
    if constexpr (kErase) s.lower_free[j].wait(out.round ^ 1);
    RowScalars rows{};
    owed.last = all - done <= kC;
    auto& query_row = Shared::kOutput ? s.query[chunk % Shared::kQueryRows] : s.scalars[i].query;
    for (bool again = false;; again = true) {
      pin(kk);  // or nvcc serialises the products (C7511)
      if (make_scalars < T, kK, kDecay, true,
          kFolded && kErase > (rows, a, s.scratch, kk, s.k[i][0], s.q[qi][0], s.scalars[i],
                               query_row, j, tokens, a.qk_l2norm, again, warp, thread, owed)) {
        break;
      }
      sync_prepare();
      multiply_keys<T, kK>(kk, s.k[i][0], s.k[i][0]);
      wait_products<0>();
    }
    if constexpr (Shared::kKeep) keep_squares(a, workspace_place(a, p, chunk), rows, thread);
    if constexpr (kErase) {
      hide_index<kWarpgroup>(thread);
      if (kDecay && (!kFolded || rows.wide)) {
        store_lower<true>(s.scratch.lower[j], s.scratch.factors[j], rows, kk, warp, thread);
      } else {
        store_lower<false>(s.scratch.lower[j], s.scratch.factors[j], rows, kk, warp, thread);
      }
      s.lower_full[i].arrive();
    }
    const auto wait_triangles = [&] { s.triangles_free[j].wait(out.round ^ 1); };
    if constexpr (!kErase) {
      wait_triangles();
      s.ready[j].arrive();
    }
    if constexpr (kScores) {
      s.queries_full[qi].wait(query_ring.round);
      make_scores<T, kK, kDecay, kFolded, kDecay ? 32 : kC>(s, i, qi, j, rows.wide, thread, [&] {
        // Only once: behind "ready" kKeep's walk, which takes no scores, may be done with this
        // chunk, and the barrier a round further.
        if constexpr (kErase && Shared::kOutput) wait_triangles();
      });
      arrive_warp(s.queries_free[qi]);
    }
    arrive_warp(s.keys_free[i]);
    if constexpr (Shared::kKeep) {
      sync_prepare();
      if (thread == 0) {
        const int64_t place = workspace_place(a, p, chunk);
        store_bytes(static_cast<unsigned char*>(a.scores) + place * Shared::kTile, s.scores[j],
                    Shared::kTile);
        store_bytes(a.scalars + place * kScalarRows * kC, &s.scalars[i], sizeof(ChunkScalars));
        commit_stores();
      }
    } else if constexpr (kScores) {
      arrive_warp(s.scores_ready[j]);
    }
  }
  if (Shared::kKeep && thread == 0) wait_stores<0>();
}

// The warpgroup that feeds k, v and q, by a warp each, and inverts what prepare() leaves, if it
// does; then it makes P_hat (kInverterScores).
template <typename T, int kK, int kV, bool kErase, bool kDecay, Walk kWalk>
__device__ __forceinline__ void feed_and_invert(const ScanMaps& maps, const ScanArgs& args,
                                                ScanShared<kK, kV, kWalk>& s, const Run& run) {
  using Shared = ScanShared<kK, kV, kWalk>;
  constexpr bool kScores = kInverterScores<kErase, kDecay, kWalk>;
  constexpr bool kFolded = kFoldedFactors<T, kErase, kDecay, kWalk>;
  const ChunkArgs& a = args.common;
  const Place& p = run.place;
  int thread = threadIdx.x % kWarpgroup;
  const int chunks = chunks_of(p);
  const int warp = agreed(thread / 32);
  const Feeder<Shared> feeder{maps, s, p};
  const bool prepared = kWalk == Walk::kAdvance || (kWalk == Walk::kKeep && args.prepared);
  const bool inverts = kErase && !prepared;
  // All chunks, or as many as there are buffers.
  const auto count = [&](int buffers) { return inverts ? min(buffers, chunks) : chunks; };
#pragma unroll 1
  for (int c = p.from; warp == 0 && c < count(Shared::kKeyStages); ++c) feeder.keys(c);
#pragma unroll 1
  for (int c = p.from; warp == 1 && run.values && c < count(Shared::kValueStages); ++c) {
    feeder.values(c);
  }
#pragma unroll 1
  for (int c = 0; warp == 2 && !prepared && c < count(Shared::kQueryStages); ++c) {
    feeder.queries(c);
  }
  if constexpr (Shared::kScores && kErase) {
    if (!inverts) return;
    __syncwarp();
    zero_tiles(s.scratch.inverse, thread);  // above the diagonal they stay zero
    zero_tiles(s.inverse, thread);
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      // All wait for the walk of chunk c - 2.
      const int key = c - 2 + Shared::kKeyStages, query = c - 2 + Shared::kQueryStages;
      // Folded, v is read a chunk ahead.
      const int value = c - (kFolded ? 1 : 2) + Shared::kValueStages;
      if (warp == 0 && c > 1 && key < chunks) feeder.keys(key);
      if (warp == 2 && c > 1 && query < chunks) feeder.queries(query);
      if (warp == 1 && value >= Shared::kValueStages && value < chunks) feeder.values(value);
      c = agreed(c);
      hide_index<kWarpgroup>(thread);
      const auto query_ring = ring_of<Shared::kQueryStages>(c);
      const auto triangles = ring_of<2>(c);
      const auto ring = ring_of<Shared::kKeyStages>(c);
      const int i = ring.index, qi = query_ring.index, j = triangles.index;
      s.triangles_free[j].wait(triangles.round ^ 1);
      s.lower_full[i].wait(ring.round);
      sync_invert();  // the chunk before is done in all warps
      invert<T>(s.scratch.lower[j], s.scratch.inverse, s.inverse[j], thread, [] {});
      const int tokens = static_cast<int>(p.tokens) - c * kC;
      if (!kFolded && tokens < kC) clear_values(s, c, tokens, thread);
      fence_async_proxy();
      s.ready[j].arrive();
      if constexpr (kScores) {
        s.queries_full[qi].wait(query_ring.round);
        const bool wide = __any_sync(0xffffffffu, s.scalars[i].whole.wide);
        make_scores<T, kK, kDecay, kFolded, kFolded ? kC : 32>(s, i, qi, j, wide, thread, [] {});
        arrive_warp(s.scores_ready[j]);
        arrive_warp(s.keys_free[i]);
        arrive_warp(s.queries_free[qi]);
      }
      s.lower_free[j].arrive();  // and the factors; each thread, so that racecheck can follow
      if constexpr (Shared::kKeep) {
        // That of the chunk before, whose buffer is next.
        if (elect_one(thread)) wait_stores_read<0>();
        sync_invert();
        if (elect_one(thread)) {
          store_bytes(
              static_cast<unsigned char*>(a.inverse) + workspace_place(a, p, c) * Shared::kTile,
              s.inverse[j], Shared::kTile);
          commit_stores();
        }
      }
    }
    if (Shared::kKeep && elect_one(thread)) wait_stores<0>();
  }
}

// In its place where the chunks have been prepared: brings in what a walk without output needs.
template <bool kErase, int kK, int kV, Walk kWalk>
__device__ __forceinline__ void load_prepared(const ChunkArgs& a, ScanShared<kK, kV, kWalk>& s,
                                              const Place& p) {
  using Shared = ScanShared<kK, kV, kWalk>;
  constexpr int kTile = Shared::kTile;
  constexpr int kBytes = kErase * kTile + static_cast<int>(sizeof(ChunkScalars));
  const int thread = threadIdx.x % kWarpgroup, chunks = chunks_of(p);
  const auto wait = [&](int c) {
    const auto [j, round] = ring_of<Shared::kTriangleStages>(c);
    s.triangles_free[j].wait(round ^ 1);
  };
  const auto load = [&](int c) {
    const int64_t place = workspace_place(a, p, c);
    const int j = c % Shared::kTriangleStages;
    Barrier& full = s.ready[j];
    full.arrive_expecting(kBytes);
    if (kErase) {
      load_bytes(s.inverse[j], static_cast<unsigned char*>(a.inverse) + place * kTile, kTile, full);
    }
    load_bytes(&s.scalars[c % Shared::kKeyStages], a.scalars + place * kScalarRows * kC,
               sizeof(ChunkScalars), full);
  };
  const int whole = chunks > 0 ? static_cast<int>(p.tokens / kC) : 0;
  if (elect_one(thread)) {
    for (int c = p.from; c < whole; ++c) wait(c), load(c);
  }
  if (kWalk == Walk::kAdvance || whole == chunks) return;  // the last part is not walked there
  // A part of a chunk comes last. Until one thread is there nobody else may look at a barrier,
  // whose parity could be that of another round.
  if (elect_one(thread)) wait(whole);
  sync_prepare();
  const int i = whole % Shared::kKeyStages, tokens = static_cast<int>(p.tokens % kC);
  s.keys_full[i].wait(whole / Shared::kKeyStages & 1);
  clear_rows<kK / 64>(s.k[i], tokens, thread);
  clear_values(s, whole, tokens, thread);
  fence_async_proxy();
  sync_prepare();
  if (elect_one(thread)) load(whole);
}

inline constexpr int kPrepareThreads = kWarpgroup + 32;
// Blocks of it that a multiprocessor takes at a time.
template <bool kScores>
inline constexpr int kPrepareBlocks = kScores ? 2 : 3;

// All of it by one warpgroup, chunk after chunk, to the workspace.
template <typename T, int kK, bool kErase, bool kDecay, bool kScores>
__device__ __forceinline__ void prepare_all(const ChunkArgs& a, PrepareShared<kK, kScores>& s,
                                            const Place& p) {
  int thread = threadIdx.x % kWarpgroup;
  const int warp = agreed(thread / 32);
  zero_tiles(s.scratch.inverse, thread);
  zero_tiles(s.inverse, thread);
  if (kScores) zero_tiles(s.scores, thread);
  Ring<PrepareShared<kK, kScores>::kKeyStages> ring;
  OwedDecay owed;
  int left = chunks_of(p) > 0 ? static_cast<int>(p.tokens) : 0;
  int chunk = 0;
  TokenSource<kDecay> source(a, p);
  source.read(a, s.scratch, 0, left, thread);
  float kk[32];
  // Starts K K^T of the ring's chunk.
  const auto start = [&](int tokens) {
    unsigned char* k = s.k[ring.index][0];
    s.keys_full[ring.index].wait(ring.round);
    if (kScores) s.queries_full[ring.index].wait(ring.round);
    if (tokens < kC) {
      clear_rows<kK / 64>(s.k[ring.index], tokens, thread);
      if (kScores) clear_rows<kK / 64>(s.q[ring.index], tokens, thread);
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
    if (elect_one(thread)) wait_stores_read<0>();  // all know behind make_scalars' barrier
    unsigned char *k = s.k[i][0], *q = s.q[kScores ? i : 0][0];
    RowScalars rows{};
    for (bool again = false;; again = true) {
      pin(kk);  // or nvcc serialises the products (C7511)
      if (make_scalars<T, kK, kDecay, true, false>(
              rows, a, s.scratch, kk, k, q, s.scalars, s.scalars.query, j, tokens,
              kScores && a.qk_l2norm, again, warp, thread, owed)) {
        break;
      }
      sync_prepare();
      multiply_keys<T, kK>(kk, k, k);
      wait_products<0>();
    }
    source.read(a, s.scratch, j ^ 1, left, thread);
    if (kScores) keep_squares(a, workspace_place(a, p, chunk), rows, thread);
    if constexpr (kErase) {
      store_lower<kDecay>(s.scratch.lower[0], s.scratch.factors[j], rows, kk, warp, thread);
    }
    if constexpr (kScores) {
      float kq[32];
      multiply_keys<T, kK>(kq, k, q);
      wait_products<0>();
      pin(kq);
      store_scores<T, kDecay, kC>(s.scratch.factors[j], s.scalars.key_out, kq, s.scores, 0, thread);
    }
    arrive_warp(s.keys_free[i]);
    if (kScores) arrive_warp(s.queries_free[i]);
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
    if (elect_one(thread)) {
      constexpr int kTile = PrepareShared<kK, kScores>::kTile;
      const int64_t place = workspace_place(a, p, chunk);
      if (kErase) {
        store_bytes(static_cast<unsigned char*>(a.inverse) + place * kTile, s.inverse, kTile);
      }
      if (kScores) {
        store_bytes(static_cast<unsigned char*>(a.scores) + place * kTile, s.scores, kTile);
      }
      store_bytes(a.scalars + place * kScalarRows * kC, &s.scalars, sizeof(ChunkScalars));
      commit_stores();
    }
    ++chunk;
    wait_products<0>();  // the compiler keeps no products in flight across iterations
    pin(kk);
  }
  if (elect_one(thread)) wait_stores<0>();
}

// Prepares chunks for walks that follow: what they need twice or more is then made once, and not in
// turn with the states. args.part_tokens are those of a block, `part_tokens` those of the walks'
// parts, the last of which without scores (that is, for the forward) needs nothing.
template <typename T, int kK, bool kErase, bool kDecay, bool kScores>
__global__ void __launch_bounds__(kPrepareThreads, kPrepareBlocks<kScores>)
    prepare_kernel(const __grid_constant__ ScanMaps maps, const __grid_constant__ ScanArgs args,
                   const int64_t part_tokens, const int hand_over_count) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& s = *reinterpret_cast<PrepareShared<kK, kScores>*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < s.kKeyStages; ++i) {
      s.keys_full[i].init(1), s.keys_free[i].init(4);
      s.queries_full[i].init(1), s.queries_free[i].init(4);
    }
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_stream();
  const ChunkArgs& a = args.common;
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < hand_over_count; i += kPrepareThreads) {
      reinterpret_cast<uint32_t*>(args.transitions)[i] = 0;
    }
  }
  Place p = find_place(args, static_cast<int>(a.columns));
  if (p.sequence < 0) return;
  if constexpr (!kScores) {
    const int64_t first = a.cu_seqlens ? a.cu_seqlens[p.sequence] : 0;
    const int64_t tokens = a.cu_seqlens ? a.cu_seqlens[p.sequence + 1] - first : a.tokens;
    p.tokens = min(p.tokens, first + (tokens - 1) / part_tokens * part_tokens - p.begin);
    if (p.tokens <= 0) return;
  }
  if (threadIdx.x < kWarpgroup) {
    prepare_all<T, kK, kErase, kDecay>(args.common, s, p);
  } else {
    const Feeder<PrepareShared<kK, kScores>> feeder{maps, s, p};
    for (int c = 0; c < chunks_of(p); ++c) feeder.keys(c), feeder.queries(c);
  }
}

}  // namespace efla::cuda::sm90
