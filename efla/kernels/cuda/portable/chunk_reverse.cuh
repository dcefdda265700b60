// The serial part of the backward, the mirror image of chunk_scan.cuh: chunks from last to first, a
// warp keeping its rows of dS^T [16, K] in registers:
//
//   dU^T = dO^T P_hat + gate_k (dS^T K^T)        dR^T = dU^T A_hat
//   dS^T = Gamma_C dS^T + (gate_q dO^T) Q - (e dR^T) K
//
// Keeps dS^T (of the state after each chunk) and dR for chunk_gradients.cuh.
#pragma once

#include "efla/kernels/cuda/portable/chunk_scan.cuh"

namespace efla::cuda {

template <int kThreads = 0, typename T, int kK, int kC, int kWarps>
__device__ void load_reverse_stage(const ChunkArgs& a, ScanStage<T, kK, kC, kWarps>& s,
                                   int64_t slot, int64_t row, int64_t begin, int tokens, int hv,
                                   int column0) {
  const int hk = hv / (a.value_heads / a.heads);
  load_part<kThreads, kC, kK>(s.k, kK + kTilePad, element<T>(a.k, row, begin, hk), a.k.token,
                              tokens, a.key_dim, a.vector_k);
  load_part<kThreads, kC, kK>(s.q, kK + kTilePad, element<T>(a.q, row, begin, hk), a.q.token,
                              tokens, a.key_dim, a.vector_q);
  load_part<kThreads, kC, kScanColumns<kWarps>>(
      s.v, s.kValuePitch, element<T>(a.grad_o, row, begin, hv) + column0, a.grad_o.token, tokens,
      a.value_dim - column0, a.vector_grad_o);
  load_prepared<true, kThreads>(a, s, slot * a.value_heads + hv);
  commit_copies();
}

// C[16, kC] += X^T Y for a lower-triangular Y [kC, kC] in shared memory: column i needs rows t >=
// i.
template <typename S, int kC>
__device__ __forceinline__ void multiply_upper(float (&c)[kC / 8][4], const float (&x)[kC / 8][4],
                                               const S* y) {
  const Range range = range_of<S>(x, c);
  multiply_by(c, range.up);
#pragma unroll
  for (int t0 = 0; t0 < kC; t0 += 16) {
    const auto a = as_a<S>(x[t0 / 8], x[t0 / 8 + 1], range.up);
#pragma unroll
    for (int i0 = 0; i0 <= t0; i0 += 16) {
      BFragment<S> b[2];
      load_b(b, y, kC + kTilePad, t0, i0);
      mma<S>(c[i0 / 8], a, b[0]);
      mma<S>(c[i0 / 8 + 1], a, b[1]);
    }
  }
  multiply_by(c, range.down);
}

// One chunk of one warp. Leaves dR in the warp's columns of the tile s.v.
template <typename T, int kK, int kC, int kWarps>
__device__ __forceinline__ void reverse_chunk(float (&state)[kK / 8][4],
                                              ScanStage<T, kK, kC, kWarps>& s) {
  constexpr int kValuePitch = kScanColumns<kWarps> + kTilePad;
  const int lane = threadIdx.x % 32, t4 = lane % 4 * 2;
  const int column = threadIdx.x / 32 * 16 + lane / 4;

  float u[kC / 8][4] = {}, grad_o[kC / 8][4];
  const Range range = range_of<T>(state);
#pragma unroll
  for (int k0 = 0; k0 < kK; k0 += 16) {
    const auto a = as_a<T>(state[k0 / 8], state[k0 / 8 + 1], range.up);
#pragma unroll
    for (int n0 = 0; n0 < kC; n0 += 16) {
      BFragment<T> b[2];
      load_b_transposed(b, s.k, kK + kTilePad, k0, n0);
      mma<T>(u[n0 / 8], a, b[0]);
      mma<T>(u[n0 / 8 + 1], a, b[1]);
    }
  }
#pragma unroll
  for (int n = 0; n < kC / 8; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int t = n * 8 + t4 + j % 2;
      u[n][j] *= range.down * s.scalars[kKeyOut * kC + t];
      const float x = static_cast<float>(s.v[t * kValuePitch + column + j / 2 * 8]);
      grad_o[n][j] = s.scalars[kQueryOut * kC + t] * x;
    }
  }
  multiply_upper<Square<T>, kC>(u, grad_o, s.scores);
  float r[kC / 8][4] = {};
  multiply_upper<Square<T>, kC>(r, u, s.inverse);
  multiply_by(r, inverse_unit(s));
#pragma unroll
  for (int n = 0; n < kC / 8; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int t = n * 8 + t4 + j % 2;
      s.v[t * kValuePitch + column + j / 2 * 8] = T(r[n][j]);
      grad_o[n][j] *= s.scalars[kQueryGate * kC + t];
      r[n][j] *= -s.scalars[kEraseIn * kC + t];
    }
  }
  add_product<T, kK, kC>(state, s.scalars[kChunkGate * kC], grad_o, s.q);
  add_product<T, kK, kC>(state, 1.f, r, s.k);
}

template <typename T, int kK, int kC, int kWarps>
__global__ void __launch_bounds__(kWarps * 32) chunk_reverse_kernel(const ChunkArgs a) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto* stages = reinterpret_cast<ScanStage<T, kK, kC, kWarps>*>(shared_bytes);
  const ScanPlace p = scan_place(a, kC, kScanColumns<kWarps>);
  const int column = p.column0 + threadIdx.x / 32 * 16;  // the warp's first

  float state[kK / 8][4] = {};
  if (a.grad_final_state) {
    visit_state<kK>(a, p, state, 0, a.key_dim, column,
                    [&](int64_t i, float& x) { x = a.grad_final_state[i]; });
  }
  const int64_t chunks = (p.last - p.first + kC - 1) / kC;
  const auto load = [&](int64_t c) {
    const int tokens = static_cast<int>(min(int64_t{kC}, p.last - p.first - c * kC));
    load_reverse_stage(a, stages[c % 2], p.slot + c, p.row, p.first + c * kC, tokens, p.hv,
                       p.column0);
  };
  if (chunks > 0) load(chunks - 1);
  for (int64_t c = chunks - 1; c >= 0; --c) {
    auto& stage = stages[c % 2];
    if (c > 0) {
      load(c - 1);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    const int64_t place = (p.slot + c) * a.value_heads + p.hv;
    shorten_rows<true>(a, stage, place);
    store_state_rows<T, kK>(static_cast<T*>(a.grad_states) + (place * a.columns + column) * kK,
                            state);
    reverse_chunk(state, stage);
    store_columns(static_cast<T*>(a.grad_r) + place * kC * a.columns + p.column0, a.columns,
                  stage.v, stage.kValuePitch, kC, kScanColumns<kWarps>, kK <= 128);
    __syncthreads();
  }
  if (a.grad_initial_state) {
    visit_state<kK>(a, p, state, 0, a.key_dim, column,
                    [&](int64_t i, float& x) { a.grad_initial_state[i] = x; });
  }
}

}  // namespace efla::cuda
