// The serial chain of the backward walk, the mirror image of scan.cuh: a warpgroup per 64 rows of
// dS^T [V, K], which it holds in float registers, chunks from last to first:
//
//   dU^T = dO^T P_hat + gate_k (dS^T K^T)        dR^T = dU^T A_hat
//   dS^T = Gamma_C dS^T + (gate_q dO^T) Q - (e dR^T) K
//
// It also writes dV = w dR, and makes what the other warps then wait for: dR.v, B + B^T
// (square_operands.cuh) and with decay <S, dS> behind the chunk.
// A_hat, P_hat^T and the scalars come from the forward walk (Walk::kKeep) as it left them in shared
// memory. dS^T (of the state after the chunk) and dR go to shared memory, for token_gradients.cuh.
// Where sequences are split, a first launch (kAdvance) takes each part from zero to its N'.
#pragma once

#include "efla/kernels/cuda/sm90/square_operands.cuh"
#include "efla/kernels/cuda/sm90/state_rows.cuh"

namespace efla::cuda::sm90 {

// What lies behind the sequence may be anything: zero. For the first step, once.
template <typename Shared>
__device__ __forceinline__ void clear_slack(Shared& s, int tokens) {
  s.grad_o_full[0].wait(0);
  const int r = threadIdx.x;
  if (r >= tokens && r < kC) {
    zero_row(s.k[0][0], Shared::kTiles, r);
    zero_row(s.q[0][0], Shared::kTiles, r);
    zero_row(s.grad_o[0][0], Shared::kTiles, r);
  }
  fence_async_proxy();
  sync_threads(1, Shared::kTiles * kWarpgroup);
  s.cleared.arrive();
}

template <int kN>
__device__ __forceinline__ void scale_state(float (&state)[kN], float factor) {
#pragma unroll
  for (int n = 0; n < kN; ++n) state[n] *= factor;
}

// The sum of the products of 8 accumulators and what ldmatrix read in an operand's order.
template <typename T>
__device__ __forceinline__ void add_dot(float (&sum)[2], const float* x, const uint32_t (&y)[4]) {
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const float2 pair = unpack<T>(y[m]);
    sum[0] += pair.x * x[2 * m];
    sum[1] += pair.y * x[2 * m + 1];
  }
}

// <S, dS> of a warp's 16 rows of both: this thread's part.
template <typename T, int kN, int kTiles>
__device__ __forceinline__ float state_dot(const float (&grad)[kN], const Tile (&tiles)[kTiles]) {
  const int thread = read_thread() % kWarpgroup, lane = thread % 32;
  const uint32_t from =
      shared_address(tiles) + tile_offset(thread / 32 * 16 + lane % 16, lane / 16 * 8);
  float sum[2] = {};
#pragma unroll
  for (int n = 0; n < kN / 8; ++n) {
    uint32_t x[4];
    ldmatrix_x4_plain(x, (from ^ n % 4 << 5) + n / 4 * static_cast<int>(sizeof(Tile)));
    add_dot<T>(sum, &grad[8 * n], x);
  }
  return sum[0] + sum[1];
}

// Writes dV = w dR of a warpgroup's columns of V, `column` the first, and leaves dR.v of them; 8
// lanes to a row, 16 rows at a time, of tiles of 64 columns of dR and v.
template <typename T, bool kPadded>
__device__ __forceinline__ void value_gradients(const ChunkArgs& a, const Place& p, int64_t begin,
                                                int tokens, int column, const Tile& grad_r,
                                                const Tile& v, const float* write,
                                                float* write_dot) {
  const int thread = read_thread() % kWarpgroup;
  T* out = static_cast<T*>(a.grad_v.data) + p.row * a.grad_v.batch +
           (begin + thread / 8) * a.grad_v.token + p.hv * a.grad_v.head + column + thread % 8 * 8;
  const int first = tile_offset(thread / 8, thread % 8 * 8);
#pragma unroll
  for (int i = 0; i < kC / 16; ++i, out += 16 * a.grad_v.token) {
    const auto grad = *reinterpret_cast<const uint4*>(&grad_r[first + i * 16 * 128]);
    const auto value = *reinterpret_cast<const uint4*>(&v[first + i * 16 * 128]);
    const int row = 16 * i + thread / 8;
    float sum = dot<T>(grad, value);
#pragma unroll
    for (int offset = 1; offset < 8; offset *= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    // What lies behind the sequence may be anything.
    if (thread % 8 == 0) write_dot[row] = row < tokens ? sum : 0.f;
    const float w = write[row];
    const uint32_t g[4] = {grad.x, grad.y, grad.z, grad.w};
    uint32_t x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pair = unpack<T>(g[j]);
      x[j] = pack<T>(w * pair.x, w * pair.y);
    }
    if (row < tokens && (!kPadded || column + thread % 8 * 8 < a.value_dim)) {
      *reinterpret_cast<uint4*>(out) = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
}

// With kOverScale the registers hold dS^T over the scale. Then gate_q dO, where it is the scale
// times dO, need not be rounded once more: where keys repeat, that is most of the error of the
// initial state's gradient.
template <typename T, bool kPadded, bool kErase, bool kDecay, bool kOverScale, int kDim,
          bool kAdvance>
__device__ __forceinline__ void walk_back(const ScanArgs& args, BackwardShared<kDim, kAdvance>& s,
                                          const Place& p) {
  using Shared = BackwardShared<kDim, kAdvance>;
  const ChunkArgs& a = args.common;
  if (p.sequence < 0) return;
  const int chunks = chunks_of(p);
  const int group = agreed(threadIdx.x / kWarpgroup);
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32, warp = thread / 32;
  const int column = 64 * group;
  const int part = warp * 2 + lane / 8 % 2;
  const uint32_t lane_offset = (lane / 16 * 8 + lane % 8) * 128 + ((part ^ (lane % 8)) << 4);
  int own_rows = tile_offset(16 * warp + lane % 16, lane / 16 * 8);
  const int64_t state_size = int64_t{a.key_dim} * a.value_dim;
  const int64_t part_offset = (p.part * a.value_heads + p.hv) * kDim * kDim;

  float state[kDim / 2] = {};
  const float scale = kOverScale ? a.scale : 1.f, inverse = kOverScale ? 1.f / a.scale : 1.f;
  const bool whole = args.part_tokens == 0 || (kAdvance && p.last);
  if (whole) {
    if (a.grad_final_state) {
      load_state<kDim, kPadded>(
          state, a.grad_final_state + (p.sequence * a.value_heads + p.hv) * state_size, a.key_dim,
          a.value_dim, column);
    }
  } else if constexpr (!kAdvance) {
    load_part<kDim>(state, args.part_states + part_offset, column);
  }
  scale_state(state, inverse);
  constexpr bool kLower = kErase && !kAdvance;
#pragma unroll 1
  for (int step = 0; step < chunks; ++step) {
    step = agreed(step);  // else what follows from it lies in registers, and spills
    const auto [i, tokens_round] = ring_of<Shared::kStages>(step);
    const auto [j, round] = ring_of<Shared::kOthers>(step);
    const ChunkScalars& scalars = s.scalars[j];
    const int kept = kAdvance ? 0 : j;
    s.tokens_full[i].wait(tokens_round);
    if (step == 0 && tokens_of(p, reversed(chunks, 0)) < kC) {
      clear_slack(s, tokens_of(p, reversed(chunks, 0)));
    }
    if (kIsBfloat16<T> && s.whole[i].long_rows) {
      if constexpr (!kAdvance) {
        s.factors_full[i].wait(tokens_round);  // the scalars' warps have shortened them
      } else if (a.qk_l2norm) {
        shorten_rows<T, Shared::kTiles, Shared::kTiles * kWarpgroup, 1>(s.k[i], s.q[i]);
      } else {
        shorten_rows<T, Shared::kTiles, Shared::kTiles * kWarpgroup, 1>(s.k[i]);
      }
    }
    hide(own_rows);  // or four addresses are kept across chunks, and spill
    if constexpr (!kAdvance) s.grad_state_free[kept].wait(round ^ 1);
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      uint32_t x[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        x[m] = pack<T>(scale * state[8 * n + 2 * m], scale * state[8 * n + 2 * m + 1]);
      }
      stmatrix_x4(shared_address(s.grad_state[kept][group][n / 4]) + (own_rows ^ n % 4 << 5), x);
    }
    fence_async_proxy();
    if constexpr (!kAdvance) s.grad_state_full[kept].arrive();
    sync_threads(4 + group, kWarpgroup);
    float u[32];
    fence_products();
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      product_shared<T>(u, describe_rows(s.grad_state[kept][group][n / 4]) + n % 4 * 2,
                        describe_rows(s.k[i][n / 4]) + n % 4 * 2, n > 0);
    }
    commit_products();
    float through = 0.f;
    if constexpr (!kAdvance && kDecay) {  // while the products run
      s.state_full[kept].wait(round);
      through = state_dot<T>(state, s.state[kept][group]);
      give_back(s.state_free[kept]);
    }
    s.grad_o_full[j].wait(round);
    uint32_t grad_o[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      ldmatrix_x4_transposed(grad_o[n],
                             shared_address(s.grad_o[j][group]) + lane_offset + n * 16 * 128);
    }
    s.triangles_full[j].wait(round);
    wait_products<0>();
    pin(u);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 out = scalar_pair(scalars.key_out, n);
#pragma unroll
      for (int h = 0; h < 2; ++h) u[4 * n + 2 * h] *= out.x, u[4 * n + 2 * h + 1] *= out.y;
    }
    if constexpr (!kAdvance && kDecay) {  // <S, dS> behind the chunk: Gamma_C S + K^T (gate_k U)
      s.u_full[kept].wait(round);
      float sum[2] = {};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        uint32_t x[4];
        ldmatrix_x4_transposed(x, shared_address(s.u[kept][group]) + lane_offset + n * 16 * 128);
        add_dot<T>(sum, &u[8 * n], x);
      }
      if constexpr (!kErase) give_back(s.u_free[kept]);  // else with L's operand
      through = sum_warp(scalars.whole.gate * through + sum[0] + sum[1]);
      const int now = read_thread();
      if (now % 32 == 0) s.through[step % 2][now / 32] = through;
    }
    pin(u);
    fence_products();
    {
      const uint64_t b = describe_rows(s.scores[j]);
#pragma unroll
      for (int n = 0; n < 4; ++n) product<T>(u, grad_o[n], b + 2 * n, true);
      commit_products();
      give_back(kAdvance ? s.grad_o_free[j] : s.grad_o_read[kept]);
      wait_products<0>();
      pin(u);
    }
    uint32_t r[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) pack_step<T>(r[n], &u[8 * n]);
    if constexpr (kErase) {
      fence_products();
      const uint64_t b = describe_columns(s.inverse[j], kC * 128);
#pragma unroll
      for (int n = 0; n < 4; ++n) product_columns<T>(u, r[n], b + 128 * n, n > 0);
      commit_products();
    }
    if (!kOverScale || kDecay || a.qk_l2norm) {  // gate_q dO, else dO as it is
#pragma unroll
      for (int n = 0; n < 16; ++n) {  // column group n / 2
        float2 query = scalar_pair(scalars.query, n / 2);
        query.x *= inverse, query.y *= inverse;
        uint32_t& pair = grad_o[n / 4][n % 4];
        if constexpr (kDecay && !kAdvance && kIsBfloat16<T>) {  // fewer registers
          pair = multiply_pairs(pair, pack<T>(query.x, query.y));
        } else {
          const float2 x = unpack<T>(pair);
          pair = pack<T>(query.x * x.x, query.y * x.y);
        }
      }
    }
    if constexpr (kDecay) {
      const float gate = scalars.whole.gate;
#pragma unroll
      for (int n = 0; n < kDim / 2; ++n) state[n] *= gate;
    }
    if constexpr (kErase) {
      wait_products<0>();
      pin(u);
    }
    if constexpr (!kAdvance) {
      arrive_warp(s.triangles_read[j]);
      s.grad_r_free[kept].wait(round ^ 1);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        pack_step<T>(r[n], &u[8 * n]);
        stmatrix_x4_transposed(shared_address(s.grad_r[kept][group]) + lane_offset + n * 16 * 128,
                               r[n]);
      }
      fence_async_proxy();
      s.grad_r_full[kept].arrive();
    }
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      float2 erase = scalar_pair(scalars.erase, n / 2);
      erase.x *= inverse, erase.y *= inverse;
      r[n / 4][n % 4] = pack<T>(-erase.x * u[2 * n], -erase.y * u[2 * n + 1]);
    }
    pin(state);
    fence_products();
    {
      const uint64_t q = describe_columns(s.q[i], kC * 128), k = describe_columns(s.k[i], kC * 128);
#pragma unroll
      for (int n = 0; n < 4; ++n) product_columns<T>(state, grad_o[n], q + 128 * n, true);
      if constexpr (kErase) {
#pragma unroll
        for (int n = 0; n < 4; ++n) product_columns<T>(state, r[n], k + 128 * n, true);
      }
      commit_products();
    }
    if constexpr (!kAdvance) {  // while the products run
      sync_threads(4 + group, kWarpgroup);
      const int chunk = reversed(chunks, step);
      s.values_full[j].wait(round);
      value_gradients<T, kPadded>(a, p, p.begin + int64_t{chunk} * kC, tokens_of(p, chunk), column,
                                  s.grad_r[kept][group], s.value_tile(j, group), scalars.write,
                                  s.write_dot[step % 2][group]);
      s.write_dot_full[step % 2].arrive();
    }
    fence_async_proxy();           // as give_back():
    s.triangles_free[j].arrive();  // each thread has read scalars, and v
    wait_products<0>();
    pin(state);
    if constexpr (kLower) {
      s.factors_full[i].wait(tokens_round);
      s.u_full[kept].wait(round);
      s.grad_r_full[kept].wait(round);
      s.lower_free.wait((step & 1) ^ 1);
      make_lower<T, kDecay>(s, s.factors[i], s.k[i], kept);
      s.lower_full.arrive();
      s.factors_free[i].arrive();
      arrive_warp(s.u_free[kept]);
      arrive_warp(s.grad_r_free[kept]);
    }
    arrive_warp(s.tokens_free[i]);
  }
  scale_state(state, scale);
  if constexpr (kAdvance) {
    store_part<kDim>(state, args.part_results + part_offset, column);
  } else if (a.grad_initial_state && p.first) {
    store_state<kDim, kPadded>(
        state, a.grad_initial_state + (p.sequence * a.value_heads + p.hv) * state_size, a.key_dim,
        a.value_dim, column);
  }
}

}  // namespace efla::cuda::sm90
