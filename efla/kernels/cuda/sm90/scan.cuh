// The serial part of the forward on Hopper: one block per (part of a sequence, value head, tile of
// V), or for Walk::kAdvance (advance.cuh) per share of these. A warpgroup per 64 columns of V holds
// its rows of the transposed state, S^T [64, K], in float registers for the whole walk; two more
// warpgroups prepare chunks ahead, one of which also feeds all through the copy engine
// (scan_prepare.cuh). Per chunk of 64 tokens
//
//   R^T = w V^T - e (S^T K^T)        U^T = R^T A_hat^T
//   O^T = gate_q (S^T Q^T) + U^T P_hat^T
//   S^T = Gamma_C S^T + (gate_k U^T) K
//
// with the per-token scalars of ScalarRow along the columns (kFoldedFactors: another order of the
// same, and S without the decay that it owes). The next chunk's S^T K^T runs while this chunk's
// output is rounded, which is sent off while that chunk's last products run.
#pragma once

#include "efla/kernels/cuda/sm90/advance.cuh"
#include "efla/kernels/cuda/sm90/scan_prepare.cuh"

namespace efla::cuda::sm90 {

// A warpgroup with 64 rows of S^T.
template <typename T, int kK, int kV, bool kErase, bool kDecay, Walk kWalk>
__device__ __forceinline__ void walk(const ScanMaps& maps, const ScanArgs& args,
                                     ScanShared<kK, kV, kWalk>& s, const Place& p) {
  using Shared = ScanShared<kK, kV, kWalk>;
  constexpr bool kOutput = Shared::kOutput, kKeep = Shared::kKeep;
  constexpr bool kFolded = kFoldedFactors<T, kErase, kDecay, kWalk>,
                 kFoldedErase = kFolded && kErase;
  const ChunkArgs& a = args.common;
  if (p.sequence < 0) return;
  const int chunks = chunks_of(p);
  const int warp = agreed(threadIdx.x / 32), group = warp / 4;
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  // One thread of the warpgroup. (Asked by its number, nvcc reads that anew each time, and waits.)
  const auto elected = [&] { return warp % 4 == 0 && elect_one(); };
  const int column = p.column0 + 64 * group;  // of V
  const bool whole = args.part_tokens == 0;
  // This lane's row of 8 columns of v and o, for the transposing 8 x 8 loads and stores.
  const int piece = thread / 32 * 2 + lane / 8 % 2;
  const uint32_t lane_offset = (lane / 16 * 8 + lane % 8) * 128 + ((piece ^ (lane % 8)) << 4);

  float state[kK / 2] = {};
  uint32_t packed[kK / 16][4];
  if (const float* from = whole ? a.initial_state : args.part_states) {
    if (whole) {
      from += (p.sequence * a.value_heads + p.hv) * a.key_dim * a.value_dim;
      load_state<kK>(state, from, a.key_dim, a.value_dim, column);
    } else {
      load_part<kK>(state, from + (p.part * a.value_heads + p.hv) * kK * a.columns, column);
    }
  }
#pragma unroll
  for (int i = 0; i < kK / 16; ++i) pack_step<T>(packed[i], &state[8 * i]);

  float r[32], o[32];
  const auto scale_output = [&](int c) {
    if (kDecay || a.qk_l2norm) {
      scale_columns(o, s.query[c % Shared::kQueryRows]);
    } else {
#pragma unroll
      for (int n = 0; n < 32; ++n) o[n] *= a.scale;
    }
  };
  // Rounds o of chunk c into its tile, from where it is sent off once all have.
  const auto round_output = [&](int c) {
    if constexpr (kFolded) scale_output(c);
    if (c > 0) s.output_free[group].wait((c & 1) ^ 1);
    const uint32_t tile = shared_address(s.o[group]) + lane_offset;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t x[4];
      pack_step<T>(x, &o[8 * n]);
      stmatrix_x4_transposed(tile + n * 16 * 128, x);
    }
  };
  const auto end_output = [&] {
    fence_async_proxy();
    arrive_warp(s.output_full[group]);
  };
  const auto send_output = [&](int c) {
    if (!elected()) return;
    s.output_full[group].wait(c & 1);
    store_box(maps.o, s.o[group], column, p.hv, static_cast<int>(p.begin) + c * kC,
              static_cast<int>(p.row));
    commit_stores();
  };
  // That of a part of a chunk, without the copy engine.
  const auto write_output = [&](int c) {
    s.output_full[group].wait(c & 1);
    const int64_t token = p.begin + int64_t{c} * kC;
    const int tokens = static_cast<int>(p.tokens - int64_t{c} * kC);
    T* out = static_cast<T*>(a.o.data) + p.row * a.o.batch + token * a.o.token + p.hv * a.o.head +
             column;
    // A thread has 8 columns and every 16th row.
    const int pieces = column + thread % 8 * 8 < a.value_dim ? tokens * 8 : 0;
    for (int n = thread; n < pieces; n += kWarpgroup) {
      *reinterpret_cast<uint4*>(out + n / 8 * a.o.token + n % 8 * 8) =
          *reinterpret_cast<const uint4*>(s.o[group] + tile_offset(n / 8, n % 8 * 8));
    }
  };

  // v^T of chunk c, packed; then as floats, in which what is behind the sequence is zero.
  const auto load_values = [&](uint32_t(&v)[4][4], int c) {
    const auto [i, round] = ring_of<Shared::kValueStages>(c);
    s.values_full[i].wait(round);
    read_values(v, shared_address(s.v[i][group]) + lane_offset);
  };
  const auto start_from_values = [&](const uint32_t(&v)[4][4], int c) {
    unpack_values<T>(r, v);
    give_back(s.values_free[c % Shared::kValueStages]);
    const int tokens = static_cast<int>(p.tokens) - c * kC;
    if (tokens < kC) {
#pragma unroll
      for (int n = 0; n < 32; ++n) {
        if (n / 4 * 8 + lane % 4 * 2 + n % 2 >= tokens) r[n] = 0.f;
      }
    }
  };

  // Sends this warpgroup's tiles of chunk c to a workspace, once all have written them.
  const auto keep = [&](void* workspace, int count, int c, const void* tiles) {
    fence_async_proxy();
    sync_threads(kKeepBarrier + group, kWarpgroup);
    if (elected()) {
      const int bytes = count * Shared::kTile;
      store_bytes(static_cast<unsigned char*>(workspace) +
                      (workspace_place(a, p, c) * Shared::kGroups + group) * bytes,
                  tiles, bytes);
      commit_stores();
    }
  };

  if (kFoldedErase && chunks > 0) {
    uint32_t v[4][4];
    load_values(v, 0);
    start_from_values(v, 0);
  }
#pragma unroll 1
  for (int c = p.from; c < chunks; ++c) {
    c = agreed(c);  // which nvcc does not see behind elect_one()
    const auto ring = ring_of<Shared::kKeyStages>(c);
    const auto triangles = ring_of<Shared::kTriangleStages>(c);
    const auto value_ring = ring_of<Shared::kValueStages>(c);
    const auto query_ring = ring_of<Shared::kQueryStages>(c);
    const int i = ring.index, vi = value_ring.index, qi = query_ring.index, j = triangles.index;
    const ChunkScalars& scalars = s.scalars[i];
    if constexpr (kFoldedErase) {  // A_hat is waited for where it is needed
      s.lower_full[i].wait(ring.round);
    } else {
      s.ready[j].wait(triangles.round);
    }
    if constexpr (kOutput) s.queries_full[qi].wait(query_ring.round);
    if (kKeep && args.prepared) {  // else prepare() has waited and shortened rows
      s.keys_full[i].wait(ring.round);
      if (kIsBfloat16<T> && scalars.whole.long_rows) {
        shorten_rows<T, kK / 64, Shared::kGroups * kWarpgroup, kShortenBarrier>(s.k[i]);
      }
    }
    bool wide = true;
    if constexpr (kFoldedErase) {
      wide = __any_sync(0xffffffffu, scalars.whole.wide);
      // Else w = e.
      if (kDecay || __any_sync(0xffffffffu, a.qk_l2norm || scalars.whole.long_rows)) {
        scale_columns(r, scalars.write);
      }
      pin(r);
    }
    fence_products();
    multiply_state<T, kK, kFoldedErase>(r, packed, s.k[i]);
    float written[32] = {};  // w v^T, made while the product runs where there are registers for it
    const auto write_values = [&] {
      s.values_full[vi].wait(value_ring.round);
      uint32_t v[4][4];
      read_values(v, shared_address(s.v[vi][group]) + lane_offset);
      unpack_values<T>(written, v);
      if constexpr (kOutput) give_back(s.values_free[vi]);
      scale_columns(written, scalars.write);
    };
    if constexpr (kKeep) {  // the state while the product runs
#pragma unroll
      for (int n = 0; n < kK / 16; ++n) {
        stmatrix_x4(shared_address(s.kept[group][n / 4]) +
                        tile_offset(16 * (thread / 32) + lane % 16, n % 4 * 16 + lane / 16 * 8),
                    packed[n]);
      }
      keep(a.states, kK / 64, c, s.kept[group][0]);
    }
    if constexpr (!kOutput) write_values();
    if constexpr (kOutput) {
      if (c > 0) round_output(c - 1);  // while the product runs
      fence_products();
      multiply_state<T, kK>(o, packed, s.q[qi]);
      if (c > 0) end_output();
    }
    float2 columns[8];
    read_columns(columns, scalars.erase);
    wait_products<0>();
    pin(r);
    if constexpr (kOutput && !kFoldedErase) write_values();
    scale_columns(r, columns);
    uint32_t u[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if constexpr (!kFoldedErase) {
#pragma unroll
        for (int m = 8 * n; m < 8 * n + 8; ++m) r[m] = written[m] - r[m];
      }
      pack_step<T>(u[n], &r[8 * n]);
    }
    // In registers that the packed state had, which is made anew below.
    auto& next_v = reinterpret_cast<uint32_t(&)[4][4]>(packed[kK / 16 - 4]);
    if constexpr (kErase) {
      if constexpr (kFoldedErase) s.ready[j].wait(triangles.round);
      fence_products();
      const uint64_t b = describe_rows(s.inverse[j]);
#pragma unroll
      for (int n = 0; n < 4; ++n) product<T>(r, u[n], b + 2 * n, n > 0);
      commit_products();
      if (kFoldedErase && c + 1 < chunks) load_values(next_v, c + 1);
    } else {
      unpack_values<T>(r, u);
    }
    if constexpr (kOutput) {
      pin(o);
      arrive_warp(s.queries_free[qi]);
      if constexpr (!kFolded) {
        scale_output(c);
        pin(o);
      }
    }
    if (kDecay && (!kFoldedErase || wide)) {
      const float gate = scalars.whole.gate;
#pragma unroll
      for (int n = 0; n < kK / 2; ++n) state[n] *= gate;
    }
    if constexpr (kErase) {
      wait_products<0>();
      pin(r);
    }
    if constexpr (!kFoldedErase) read_columns(columns, scalars.key_out);
    uint32_t key_u[4][4];
    if (kFoldedErase && wide) scale_columns(r, scalars.key_out);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float2 out{1.f, 1.f};
      if constexpr (!kFoldedErase) out = columns[n];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float x = r[4 * n + 2 * h], y = r[4 * n + 2 * h + 1];
        if constexpr (!kFolded) u[n / 2][n % 2 * 2 + h] = pack<T>(x, y);
        key_u[n / 2][n % 2 * 2 + h] = pack<T>(x * out.x, y * out.y);
      }
    }
    pin(state);
    if constexpr (kOutput) s.scores_ready[j].wait(triangles.round);
    fence_products();
    const uint64_t keys = describe_columns(s.k[i], kC * 128);
#pragma unroll
    for (int n = 0; n < 4; ++n) product_columns<T>(state, key_u[n], keys + 128 * n, true);
    commit_products();
    if constexpr (kOutput) {
      const uint64_t b = describe_columns(s.scores[j], kC * 128);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        product_columns<T>(o, kFolded ? key_u[n] : u[n], b + 128 * n, true);
      }
      commit_products();
      // While the products run: o of the chunk before leaves, the next one's v is unpacked.
      if (c > 0) send_output(c - 1);
      if (kFoldedErase && c + 1 < chunks) start_from_values(next_v, c + 1);
      wait_products<1>();
    } else {  // U, without decay over |k|, while the product runs
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        stmatrix_x4_transposed(shared_address(s.v[vi][group]) + lane_offset + n * 16 * 128,
                               kDecay ? u[n] : key_u[n]);
      }
      // The state has left: all know behind the barrier.
      if (elected()) wait_stores_read<0>();
      keep(a.u, 1, c, s.v[vi][group]);
      wait_products<0>();
    }
    pin(state);
    if constexpr (kDecay && kFoldedErase) {
      const float pay = scalars.whole.pay;
      if (__any_sync(0xffffffffu, pay != 1.f)) {
#pragma unroll
        for (int n = 0; n < kK / 2; ++n) state[n] *= pay;
      }
    }
#pragma unroll
    for (int n = 0; n < kK / 16; ++n) pack_step<T>(packed[n], &state[8 * n]);
    wait_products<0>();
    if constexpr (kOutput) pin(o);
    __syncwarp();
    // What ordinary loads have read of these buffers is in products that have ended.
    s.keys_free[i].arrive_if(lane == 0);
    s.triangles_free[j].arrive_if(lane == 0);
    if (kKeep || c > 0) {
      if (elected()) {
        wait_stores_read<0>();
        (kKeep ? s.values_free[vi] : s.output_free[group]).arrive();
      }
    }
  }
  if constexpr (kOutput) {
    if (chunks > 0) {
      round_output(chunks - 1);
      end_output();
      if (p.tokens % kC == 0) {
        send_output(chunks - 1);
      } else {
        write_output(chunks - 1);
      }
    }
    if (elected()) wait_stores<0>();
    if (a.final_state && p.last) {
      float* to = a.final_state + (p.sequence * a.value_heads + p.hv) * a.key_dim * a.value_dim;
      store_state<kK>(state, to, a.key_dim, a.value_dim, column);
    }
  } else {
    if (elected()) wait_stores<0>();
  }
}

// Calls take(run) for what the block walks.
template <int kK, int kV, Walk kWalk, typename Take>
__device__ __forceinline__ void each_run(const ScanArgs& args, const ScanShared<kK, kV, kWalk>& s,
                                         Take take) {
  if constexpr (kWalk == Walk::kAdvance) {
#pragma unroll 1
    for (int i = 0; i < s.run_count; ++i) {
      const Run run = s.runs[i];
      take(run);
    }
  } else {
    take(Run{find_place(args, kV)});
  }
}

template <int kV>
inline constexpr int kScanThreads = (kV / 64 + 2) * kWarpgroup;

template <typename T, int kK, int kV, bool kErase, bool kDecay, Walk kWalk>
__global__ void __launch_bounds__(kScanThreads<kV>, 1)
    scan_kernel(const __grid_constant__ ScanMaps maps, const __grid_constant__ ScanArgs args) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& s = *reinterpret_cast<ScanShared<kK, kV, kWalk>*>(shared_bytes);
  constexpr int kGroups = kV / 64;
  constexpr bool kWide = kGroups == 2;
  constexpr bool kAdvance = kWalk == Walk::kAdvance;
  // Registers of a thread. Beside two warpgroups that walk, the other two share what these leave:
  // the one that prepares needs more where nobody inverts, and where decay makes scalars longer.
  constexpr bool kLong = kDecay && !(kErase && kFoldedFactors<T, kErase, kDecay, kWalk>);
  constexpr int kPlain = !kErase ? 96 : kWalk == Walk::kKeep ? 72 : 64;
  constexpr int kWalker = !kWide ? 232 : kAdvance ? 200 : 192;
  constexpr int kPrepare = !kWide ? 152 : kAdvance ? 56 : kPlain + 8 * kLong;
  constexpr int kInvert = !kWide ? 96 : 512 - 2 * kWalker - kPrepare;
  init_barriers<kInverterScores<kErase, kDecay, kWalk>>(s, args.prepared);
  // While the stream is waited for, by warps that have nothing to set up.
  if (threadIdx.x == 32) prefetch(maps.k), prefetch(maps.v);
  if (kWalk != Walk::kAdvance && threadIdx.x == 64) prefetch(maps.q);
  if (kWalk == Walk::kOutput && threadIdx.x == 96) prefetch(maps.o);
  wait_for_stream();
  if constexpr (kAdvance) {
    if (threadIdx.x / 32 == 1) {
      const int count = list_runs<kV>(args, s.runs);
      if (threadIdx.x % 32 == 0) s.run_count = count;
    }
  }
  __syncthreads();
  const int group = threadIdx.x / kWarpgroup;
  // Each role finds or reads its place for itself: kept across their register limits it would
  // spill.
  if (group < kGroups) {
    take_registers<kWalker>();
    each_run(args, s, [&](const Run& run) {
      if constexpr (kAdvance) {
        advance<T, kK, kV, kErase, kDecay>(args, s, run);
      } else {
        walk<T, kK, kV, kErase, kDecay>(maps, args, s, run.place);
      }
    });
  } else if (group == kGroups) {
    give_registers<kPrepare>();
    each_run(args, s, [&](const Run& run) {
      if (kAdvance || (kWalk == Walk::kKeep && args.prepared)) {
        load_prepared<kErase>(args.common, s, run.place);
      } else if constexpr (!kAdvance) {
        prepare<T, kK, kV, kErase, kDecay>(args.common, s, run.place);
      }
    });
  } else {
    give_registers<kInvert>();
    each_run(args, s, [&](const Run& run) {
      feed_and_invert<T, kK, kV, kErase, kDecay, kWalk>(maps, args, s, run);
    });
  }
}

}  // namespace efla::cuda::sm90
