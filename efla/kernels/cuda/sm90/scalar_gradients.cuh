// The warps of the backward walk that own the scalars, a thread per token of the chunk: the step
// rule's coefficients for token_gradients.cuh and then, from the sums that come back, the gradients
// of beta and log_decay.
#pragma once

#include "efla/kernels/cuda/sm90/backward_shared.cuh"

namespace efla::cuda::sm90 {

// Of the log gate by log_decay.
__device__ __forceinline__ float log_gate_slope(Rule rule, float log_decay) {
  return rule == Rule::kExact ? expf(log_decay) : 1.f;
}

template <typename T, int kDim, bool kErase, bool kDecay>
struct ScalarGradients {
  using Shared = GradientShared<kDim>;
  const ChunkArgs& a;
  Shared& s;
  const Place& p;
  int t, lane;  // token of the chunk; lane of the warp

  // This thread's token: its inputs, and what make_factors() found.
  struct Token {
    float beta, log_decay, lambda, norm, key_scale, erase, query, gamma, through;
  };

  static __device__ __forceinline__ void sync() { sync_threads(3, 32 * kScalarWarps); }

  // Reads the inputs of a chunk's token, and sends for its v.
  __device__ __forceinline__ Token begin(int chunk) {
    Token x{};
    if (t >= tokens_of(p, chunk)) return x;
    const int64_t token = p.begin + int64_t{chunk} * kC + t;
    x.beta = *element<float>(a.beta, p.row, token, p.hv);
    if constexpr (kDecay) x.log_decay = *element<float>(a.log_decay, p.row, token, p.hv);
    const T* v = element<T>(a.v, p.row, token, p.hv);
#pragma unroll
    for (int n = 0; n < Shared::kTiles; ++n) {
      if (64 * n < a.value_dim) asm volatile("prefetch.global.L2 [%0];" ::"l"(v + 64 * n));
    }
    return x;
  }

  // Both halves' sums of x over the chunk's tokens; `slot` of s.halves is this sum's own.
  __device__ __forceinline__ float2 sum_halves(float x, int slot) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    if (lane == 0) s.halves[2 * slot + t / 32] = x;
    sync();
    return make_float2(s.halves[2 * slot], s.halves[2 * slot + 1]);
  }

  // What the step rule has to know of the key having been shortened.
  __device__ __forceinline__ float rule_unit(const TokenFactors& f) const {
    return kIsBfloat16<T> && !a.qk_l2norm ? f.key_unit.get(t) : 1.f;
  }

  // The coefficients of the chunk in ring stage `stage`. Shortens this token's row of K and Q where
  // the forward walk did.
  __device__ __forceinline__ void make_factors(Token& x, int stage, TokenFactors& f, int tokens) {
    if constexpr (kIsBfloat16<T>) {
      float key_unit = 1.f;
      if (s.whole[stage].long_rows) {
        key_unit = shorten_row<T>(s.k[stage][0], Shared::kTiles, t);
        f.query_unit.set(t, a.qk_l2norm ? shorten_row<T>(s.q[stage][0], Shared::kTiles, t) : 1.f);
      }
      f.key_unit.set(t, key_unit);
    }
    const float kk = square_of_row<T>(s.k[stage][0], Shared::kTiles, t);
    const float qq = a.qk_l2norm ? square_of_row<T>(s.q[stage][0], Shared::kTiles, t) : 0.f;
    x.key_scale = a.qk_l2norm ? rsqrtf(kk + 1e-6f) : 1.f;
    x.lambda = a.qk_l2norm ? kk / (kk + 1e-6f) : kk;
    x.norm = kk > 0.f ? sqrtf(x.lambda) : 1.f;
    StepCoefficients<float> c{0.f, 0.f, 0.f};
    if (t < tokens) {
      c = key_coefficients(a.rule, x.beta, x.lambda, rule_unit(f), kDecay, x.log_decay);
    }
    x.gamma = 1.f;
    if constexpr (kDecay) {
      float sum = c.log_gate;
#pragma unroll
      for (int offset = 1; offset < 16; offset *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, sum, offset);
        if (lane % 16 >= offset) sum += other;
      }
      const float head = expf(sum), column = x.key_scale / x.norm;
      const float tail = expf(__shfl_sync(0xffffffffu, sum, lane | 15) - sum);
      if (lane % 16 == 15) f.block_gate[t / 16] = head;
      sync();
      const GateFactors gates(f.block_gate);
      x.gamma = gates.between(-1, t / 16) * head;
      x.through = gates.between(-1, 4);
      f.gate[t] = sum;
      f.head[t] = head;
      f.column[t] = column;
      f.column_tail[t] = tail * column;
      f.x[t] = gates.between(t / 16, 4) * tail * column;
    }
    x.erase = c.erase;
    x.query = a.scale * (a.qk_l2norm ? rsqrtf(qq + 1e-6f) : 1.f);
    const float row = -x.norm * x.key_scale;
    f.row[t] = row;
    f.symmetric[t] = c.erase * row;
    f.query[t] = x.query;
    f.key[t] = x.key_scale;
    f.z[t] = c.erase * x.gamma * row;
    f.y[t] = kDecay ? x.query * x.gamma : 1.f;
  }

  // Gamma_C <S, dS> of the states on both sides of the chunk: the traces of X Y^T for blocks of 16
  // rows of both, of which each warp has two in every tile.
  __device__ __forceinline__ void keep_state_product(int kept, float gate) {
    CFragment dots[2] = {};
    const uint32_t offset = tile_offset(t / 32 * 32 + lane % 16, lane / 16 * 8);
    const uint32_t before = shared_address(s.state[kept]) + offset;
    const uint32_t after = shared_address(s.grad_state[kept]) + offset;
#pragma unroll 1
    for (int i = 0; i < Shared::kTiles * Shared::kTiles * 2; ++i) {
      const uint32_t block = i / 2 * Shared::kTile + i % 2 * (16 * 128);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        uint32_t x[4], y[4];
        ldmatrix_x4_plain(x, (before + block) ^ n << 5);
        ldmatrix_x4_plain(y, (after + block) ^ n << 5);
        add_dots<T>(dots, x, y);
      }
    }
    const float2 both = diagonal(dots, lane);
    float sum = on_diagonal(lane) ? both.x + both.y : 0.f;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane == 0) s.states[t / 32] = gate * sum;
  }

  __device__ __forceinline__ void store(const MutableView& view, int64_t begin, float value) const {
    if (view.data) {
      static_cast<float*>(
          view.data)[p.row * view.batch + (begin + t) * view.token + p.hv * view.head] = value;
    }
  }

  // de, dw through the step rule; 2 dlambda goes on the diagonal of (B + B^T). With decay what
  // passes through the gate is still to be added.
  __device__ __forceinline__ StepInputGradients<float> finish_step(
      const Token& x, const TokenFactors& f, float grad_erase, float grad_gate, float write_dot) {
    const auto g =
        key_coefficients_backward(a.rule, x.beta, x.lambda, rule_unit(f), kDecay, x.log_decay,
                                  {grad_gate, grad_erase, x.norm * write_dot});
    if constexpr (kErase) {
      *reinterpret_cast<T*>(s.pairs[2] + tile_offset(t, t)) =
          T(2.f * g.lambda * x.key_scale * x.key_scale);
      fence_async_proxy();
    }
    return g;
  }

  // Without decay.
  __device__ __forceinline__ void finish(const Token& x, const TokenFactors& f, int64_t begin,
                                         int tokens, float write_dot) {
    float grad_erase = 0.f;
    if constexpr (kErase) {
      grad_erase = s.sums.pairs[0][t] - x.gamma * x.norm * x.key_scale * s.sums.zk[t];
    }
    const auto g = finish_step(x, f, grad_erase, 0.f, write_dot);
    s.diagonal_full.arrive();  // the sums have been read, too
    if (t >= tokens) return;
    store(a.grad_beta, begin, g.beta);
    store(a.grad_log_decay, begin, g.log_decay);
  }

  // With decay: dK waits for the diagonal alone, which the log gates' gradients are no part of.
  __device__ __forceinline__ void finish_gated(const Token& x, const TokenFactors& f, int64_t begin,
                                               int tokens, float write_dot, uint32_t round) {
    float grad_erase = 0.f, gate = 0.f;
    if constexpr (kErase) {
      s.lower_full.wait(round);
      grad_erase = s.sums.pairs[0][t];
      if (Shared::kTiles == 2 && t >= kC / 2) grad_erase += lower_rows(s.sums, 1)[t];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i >= t / 16) gate -= s.sums.columns[0][i][t];
      }
      s.erased_full.wait(round);
      grad_erase -= x.gamma * x.norm * x.key_scale * s.sums.zk[t];
      gate += x.erase * grad_erase;
    }
    const auto g = finish_step(x, f, grad_erase, 0.f, write_dot);
    if constexpr (kErase) s.diagonal_full.arrive();
    s.sums_full.wait(round);
    const float xk = s.sums.xk[t];
    gate += x.query * x.gamma * s.sums.yq[t] - s.sums.pairs[1][t] - xk;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i <= t / 16) gate += s.sums.columns[1][i][t];
    }
    s.sums_free.arrive();
    // From this token to the chunk's last, and what the whole chunk lets through.
    const float2 writes = sum_halves(xk, 0);
    const float through = writes.x + writes.y + s.states[0] + s.states[1];
    const float2 gates = sum_halves(gate, 1);
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float other = __shfl_down_sync(0xffffffffu, gate, offset);
      if (lane + offset < 32) gate += other;
    }
    if (t >= tokens) return;
    gate += (t < 32 ? gates.y : 0.f) + through;
    store(a.grad_beta, begin, g.beta);
    store(a.grad_log_decay, begin, g.log_decay + gate * log_gate_slope(a.rule, x.log_decay));
  }

  // Up to the factors of the chunk of `step`.
  __device__ __forceinline__ Token prepare(int step) {
    static_assert(Shared::kStages == 2);
    const int stage = step % 2, chunk = reversed(chunks_of(p), step), tokens = tokens_of(p, chunk);
    Token x = begin(chunk);
    s.tokens_full[stage].wait(step / 2 & 1);
    if (tokens < kC) s.cleared.wait(0);
    s.factors_free[stage].wait((step / 2 & 1) ^ 1);
    make_factors(x, stage, s.factors[stage], tokens);
    s.factors_full[stage].arrive();
    arrive_warp(s.tokens_free[stage]);
    return x;
  }

  __device__ __forceinline__ void walk() {
    if (chunks_of(p) == 0) return;
    Token token = prepare(0);
#pragma unroll 1
    for (int step = 0; step < chunks_of(p); ++step) {
      const uint32_t round = step & 1, kept_round = step / Shared::kKept & 1;
      const int kept = step % Shared::kKept;
      hide(t);                 // or addresses are kept across chunks, and spill
      if constexpr (kDecay) {  // ahead of all else: the chain waits for these buffers
        s.state_full[kept].wait(kept_round);
        s.grad_state_full[kept].wait(kept_round);
        keep_state_product(kept, token.through);
        fence_async_proxy();  // as give_back()
        s.state_free[kept].arrive();
        s.grad_state_free[kept].arrive();
      }
      // The next chunk's factors first: this one's sums are a while in coming.
      Token next{};
      if (step + 1 < chunks_of(p)) next = prepare(step + 1);
      const int chunk = reversed(chunks_of(p), step);
      s.write_dot_full[kept].wait(kept_round);
      float write_dot = s.write_dot[kept][0][t];
#pragma unroll
      for (int n = 1; n < Shared::kTiles; ++n) write_dot += s.write_dot[kept][n][t];
      s.grad_r_free[kept].arrive();  // write_dot is free, too
      if constexpr (kDecay) {
        finish_gated(token, s.factors[step % 2], p.begin + int64_t{chunk} * kC, tokens_of(p, chunk),
                     write_dot, round);
      } else {
        s.sums_full.wait(round);
        finish(token, s.factors[step % 2], p.begin + int64_t{chunk} * kC, tokens_of(p, chunk),
               write_dot);
      }
      token = next;
    }
  }
};

}  // namespace efla::cuda::sm90
