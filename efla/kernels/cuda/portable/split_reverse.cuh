// The reverse scan of chunk_reverse.cuh with K split over pairs of warps (split_scan.cuh): of dS^T
// K^T a warp makes a summand, both of a pair make all of dU and dR, and each writes dR of half of
// the chunk's tokens.
#pragma once

#include "efla/kernels/cuda/portable/chunk_reverse.cuh"
#include "efla/kernels/cuda/portable/split_scan.cuh"

namespace efla::cuda {

// One chunk of one warp. Leaves its share of dR in `out`.
template <typename T, int kK, int kC>
__device__ __forceinline__ void split_reverse_chunk(float (&state)[kK / 16][4],
                                                    float (&out)[kC / 16][4],
                                                    SplitShared<T, kK, kC>& shared,
                                                    const ScanStage<T, kK, kC, kPairs>& s,
                                                    const SplitWarp<kK, kC>& w) {
  using Warp = SplitWarp<kK, kC>;
  constexpr int kPitch = kK + kTilePad;
  float u[kC / 8][4] = {};
  {
    AFragment<T> operand[Warp::kRows / 16];
    const Range range = range_of<T>(state);
    state_operand<T, Warp::kRows>(operand, state, range.up);
    multiply_state<T, Warp::kRows, kC, kPitch>(u, operand, s.k + w.row, w.whole());
    multiply_by(u, range.down);
  }
  put_sums(shared.sums[2 * w.pair + w.half], u);
  AFragment<T> v[kC / 16];
  load_columns<T, kC>(v, s.v, s.kValuePitch, w.column);
  float grad_o[kC / 8][4];
#pragma unroll
  for (int n = 0; n < kC / 8; ++n) {
    const float2 unit = scalars_of<kC>(s.scalars, kQueryOut, n);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 x = two_of(v, n, i);
      grad_o[n][2 * i] = unit.x * x.x, grad_o[n][2 * i + 1] = unit.y * x.y;
    }
  }
  w.sync();
  add_sums(u, shared.sums[2 * w.pair + 1 - w.half]);
  multiply_columns<kC>(u, s.scalars, kKeyOut);
  multiply_upper<Square<T>, kC>(u, grad_o, s.scores);
  float r[kC / 8][4] = {};
  multiply_upper<Square<T>, kC>(r, u, s.inverse);
  multiply_by(r, inverse_unit(s));
  take_half(out, r, w.half);
  multiply_columns<kC>(grad_o, s.scalars, kQueryGate);
  add_to_state<T, Warp::kRows, kC, kPitch>(state, s.scalars[kChunkGate * kC], grad_o, s.q + w.row,
                                           w.whole());
  multiply_columns<kC>(r, s.scalars, kEraseIn);
  multiply_by(r, -1.f);
  add_to_state<T, Warp::kRows, kC, kPitch>(state, 1.f, r, s.k + w.row, w.whole());
}

template <typename T, int kK, int kC>
__global__ void __launch_bounds__(kSplitThreads) split_reverse_kernel(const ChunkArgs a) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<SplitShared<T, kK, kC>*>(shared_bytes);
  const ScanPlace p = scan_place(a, kC, kScanColumns<kPairs>);
  const SplitWarp<kK, kC> w(a, p);
  const int column = p.column0 + w.column;

  float state[kK / 16][4] = {};
  if (a.grad_final_state) {
    visit_state<kK / 2>(a, p, state, w.row, w.end(a), column,
                        [&](int64_t i, float& x) { x = a.grad_final_state[i]; });
  }
  const int64_t chunks = (p.last - p.first + kC - 1) / kC;
  const bool idle_half = w.idle_half(a, p, a.vector_grad_o);
  const auto load = [&](int64_t c) {
    const int tokens = static_cast<int>(min(int64_t{kC}, p.last - p.first - c * kC));
    auto& stage = shared.stages[c % 2];
    if (!idle_half) {
      load_reverse_stage<kSplitThreads>(a, stage, p.slot + c, p.row, p.first + c * kC, tokens, p.hv,
                                        p.column0);
    } else if (!w.busy) {
      load_reverse_stage<kSplitThreads / 2>(a, stage, p.slot + c, p.row, p.first + c * kC, tokens,
                                            p.hv, p.column0);
    }
  };
  if (chunks > 0) load(chunks - 1);
  for (int64_t c = chunks - 1; c >= 0; --c) {
    auto& stage = shared.stages[c % 2];
    wait_copies<0>();
    __syncthreads();  // and the other stage has been read
    if (c > 0) load(c - 1);
    const int64_t place = (p.slot + c) * a.value_heads + p.hv;
    shorten_rows<true>(a, stage, place);
    if (!w.busy) continue;
    store_tiles(static_cast<T*>(a.grad_states) + (place * a.columns + column) * kK + w.row, kK,
                state, 16, w.rows);
    float out[kC / 16][4];
    split_reverse_chunk(state, out, shared, stage, w);
    store_columns_half(static_cast<T*>(a.grad_r) + (place * kC + w.token) * a.columns + column,
                       a.columns, stage.v + w.token * stage.kValuePitch + w.column,
                       stage.kValuePitch, out, kC, 16, true);
  }
  if (a.grad_initial_state) {
    visit_state<kK / 2>(a, p, state, w.row, w.end(a), column,
                        [&](int64_t i, float& x) { a.grad_initial_state[i] = x; });
  }
}

}  // namespace efla::cuda
