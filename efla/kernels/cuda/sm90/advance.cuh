// The walk of Walk::kAdvance: of a part of a sequence the state alone, from zero or what enters
// (N), or from the identity and without values (M), with chunks that prepare_kernel has prepared. A
// warpgroup holds 64 rows of S^T as in scan.cuh. Per chunk
//
//   R^T = w V^T - e (S^T K^T)     U^T = R^T A_hat^T     S^T = Gamma_C S^T + (gate_k U^T) K
//
// A chunk is waited for while the last product of the one before runs, and that one's buffers are
// given back while its own first product does. Two warpgroups, whom nobody else keeps apart, update
// their states in turn, so that one multiplies while the other rounds.
#pragma once

#include "efla/kernels/cuda/sm90/advance_share.cuh"
#include "efla/kernels/cuda/sm90/state_rows.cuh"
#include "efla/kernels/cuda/sm90/transition.cuh"

namespace efla::cuda::sm90 {

template <typename T, int kK, int kV, bool kErase, bool kDecay>
__device__ __forceinline__ void advance(const ScanArgs& args, ScanShared<kK, kV, Walk::kAdvance>& s,
                                        const Run& run) {
  using Shared = ScanShared<kK, kV, Walk::kAdvance>;
  const ChunkArgs& a = args.common;
  const Place& p = run.place;
  const bool values = run.values;
  if (p.sequence < 0) return;
  const int chunks = chunks_of(p);  // at least one more than p.from
  const int group = agreed(threadIdx.x / kWarpgroup);
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  const int column = p.column0 + 64 * group;  // of V
  // This lane's row of 8 columns of v, for the transposing 8 x 8 loads.
  const int piece = thread / 32 * 2 + lane / 8 % 2;
  const uint32_t lane_offset = (lane / 16 * 8 + lane % 8) * 128 + ((piece ^ (lane % 8)) << 4);

  float state[kK / 2] = {};
  float* const result = (values ? args.part_results : args.transitions) +
                        (p.part * a.value_heads + p.hv) * kK * a.columns;
  if (run.resumes) {
    take_over(args);
    if (values) {
      load_part<kK>(state, result, column);
    } else {
      load_unfinished<kK>(state, result, column);
    }
  } else if (!values) {
    const int ahead = state_column(column) - lane % 4 * 2;  // of K's row 0: the identity
#pragma unroll
    for (int n = 0; n < kK / 2; ++n) {
      state[n] = n / 4 * 8 + n % 2 == ahead + n / 2 % 2 * 8 ? 1.f : 0.f;
    }
  } else if (p.first && a.initial_state) {
    const int64_t size = int64_t{a.key_dim} * a.value_dim;
    load_state<kK>(state, a.initial_state + (p.sequence * a.value_heads + p.hv) * size, a.key_dim,
                   a.value_dim, column);
  }
  uint32_t packed[kK / 16][4];
#pragma unroll
  for (int i = 0; i < kK / 16; ++i) pack_step<T>(packed[i], &state[8 * i]);

  // The first warpgroup begins a run's turns, the second ends them.
  constexpr bool kTurns = Shared::kGroups == 2;
  const auto take_turn = [&] { sync_threads(kTurnBarrier + group, 2 * kWarpgroup); };
  const auto pass_turn = [&] { arrive_threads(kTurnBarrier + 1 - group, 2 * kWarpgroup); };
  if (kTurns && group == 1) pass_turn();

  bool long_rows = false;
  const auto await_chunk = [&](int c) {
    const auto ring = ring_of<Shared::kKeyStages>(c);
    const auto triangles = ring_of<Shared::kTriangleStages>(c);
    s.ready[triangles.index].wait(triangles.round);
    s.keys_full[ring.index].wait(ring.round);
    long_rows = kIsBfloat16<T> && s.scalars[ring.index].whole.long_rows;
  };
  // What ordinary loads have read of these buffers is in products that have ended.
  const auto free_chunk = [&](int c) {
    s.keys_free[c % Shared::kKeyStages].arrive_if(lane == 0);
    s.triangles_free[c % Shared::kTriangleStages].arrive_if(lane == 0);
    s.values_free[c % Shared::kValueStages].arrive_if(lane == 0 && values);
  };
  await_chunk(p.from);
#pragma unroll 1
  for (int c = p.from; c < chunks; ++c) {
    if (long_rows) {
      shorten_rows<T, kK / 64, Shared::kGroups * kWarpgroup, kShortenBarrier>(
          s.k[c % Shared::kKeyStages]);
    }
    c = agreed(c);  // which nvcc does not see behind the above
    const int i = c % Shared::kKeyStages, j = c % Shared::kTriangleStages;
    const ChunkScalars& scalars = s.scalars[i];
    float r[32];
    fence_products();
    multiply_state<T, kK>(r, packed, s.k[i]);
    if (c > p.from) free_chunk(c - 1);
    float written[32] = {};  // w v^T
    if (values) {
      const auto [vi, round] = ring_of<Shared::kValueStages>(c);
      s.values_full[vi].wait(round);
      uint32_t v[4][4];
      read_values(v, shared_address(s.v[vi][group]) + lane_offset);
      unpack_values<T>(written, v);
      scale_columns(written, scalars.write);
    }
    float2 columns[8];
    read_columns(columns, scalars.erase);
    wait_products<0>();
    pin(r);
    scale_columns(r, columns);
    uint32_t u[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int m = 8 * n; m < 8 * n + 8; ++m) r[m] = written[m] - r[m];
      pack_step<T>(u[n], &r[8 * n]);
    }
    if constexpr (kErase) {
      fence_products();
      const uint64_t b = describe_rows(s.inverse[j]);
#pragma unroll
      for (int n = 0; n < 4; ++n) product<T>(r, u[n], b + 2 * n, n > 0);
      commit_products();
    } else {
      unpack_values<T>(r, u);
    }
    if constexpr (kDecay) {
      const float gate = scalars.whole.gate;
#pragma unroll
      for (int n = 0; n < kK / 2; ++n) state[n] *= gate;
    }
    read_columns(columns, scalars.key_out);
    if constexpr (kErase) {
      wait_products<0>();
      pin(r);
    }
    scale_columns(r, columns);
#pragma unroll
    for (int n = 0; n < 4; ++n) pack_step<T>(u[n], &r[8 * n]);
    pin(state);
    fence_products();
    if (kTurns) take_turn();
    const uint64_t keys = describe_columns(s.k[i], kC * 128);
#pragma unroll
    for (int n = 0; n < 4; ++n) product_columns<T>(state, u[n], keys + 128 * n, true);
    commit_products();
    if (c + 1 < chunks) await_chunk(c + 1);
    wait_products<0>();
    pin(state);
    if (kTurns && !(group == 1 && c + 1 == chunks)) pass_turn();
#pragma unroll
    for (int n = 0; n < kK / 16; ++n) pack_step<T>(packed[n], &state[8 * n]);
    __syncwarp();
  }
  free_chunk(chunks - 1);
  if (values) {
    store_part<kK>(state, result, column);
  } else if (run.breaks_off) {
    store_unfinished<kK>(state, result, column);
  } else {
    store_transition<kK>(state, result, column);
  }
  if (run.breaks_off) hand_over(args);
}

}  // namespace efla::cuda::sm90
