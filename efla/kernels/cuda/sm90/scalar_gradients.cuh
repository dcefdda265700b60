// The warps of the backward walk that own the scalars, a thread per token of the chunk: the step
// rule's coefficients for token_gradients.cuh and then, from the sums that come back, the gradients
// of beta and log_decay.
#pragma once

#include "efla/kernels/cuda/sm90/backward_shared.cuh"

namespace efla::cuda::sm90 {

template <typename T, int kDim, bool kErase, bool kDecay>
struct ScalarGradients {
  using Shared = GradientShared<kDim>;
  const ChunkArgs& a;
  Shared& s;
  const Place& p;
  int t, lane;  // token of the chunk; lane of the warp

  struct Input {
    float beta, log_decay, key_square, query_square;
  };

  // What a token's gradients need of it once their sums are there. The slopes are made ahead, or dK
  // would wait for them.
  struct Token {
    StepSlopes<float> slopes;
    float norm, through_norm;  // |k| and Gamma r |k|
    float erase;               // with decay
  };

  static __device__ __forceinline__ void sync() { sync_threads(3, 32 * kScalarWarps); }

  // Reads the inputs of a chunk's token.
  __device__ __forceinline__ Input read_input(int chunk) {
    const float* squares = a.scalars + workspace_place(a, p, chunk) * kScalarRows * kC + t;
    Input x{0.f, 0.f, squares[kKeySquare * kC], 0.f};
    if (a.qk_l2norm) x.query_square = squares[kQuerySquare * kC];
    if (t >= tokens_of(p, chunk)) return x;
    const int64_t token = p.begin + int64_t{chunk} * kC + t;
    x.beta = *element<float>(a.beta, p.row, token, p.hv);
    if constexpr (kDecay) x.log_decay = *element<float>(a.log_decay, p.row, token, p.hv);
    return x;
  }

  // Both halves' sums of x over the chunk's tokens. Chunks take `halves` in turn.
  __device__ __forceinline__ float2 sum_halves(float x, float (&halves)[kScalarWarps]) {
    x = sum_warp(x);
    if (lane == 0) halves[t / 32] = x;
    sync();
    return make_float2(halves[0], halves[1]);
  }

  // What the step rule has to know of the key having been shortened.
  __device__ __forceinline__ float rule_unit(const TokenFactors& f) const {
    return kIsBfloat16<T> && !a.qk_l2norm ? f.key_unit.get(t) : 1.f;
  }

  // The coefficients of the chunk in ring stage `stage`, and their slopes. Shortens this token's
  // row of K and Q where the forward walk did; the squares are those behind that.
  __device__ __forceinline__ Token make_factors(const Input& x, int stage, TokenFactors& f,
                                                int tokens) {
    if constexpr (kIsBfloat16<T>) {
      float key_unit = 1.f;
      if (s.whole[stage].long_rows) {
        key_unit = shorten_row<T>(s.k[stage][0], Shared::kTiles, t);
        f.query_unit.set(t, a.qk_l2norm ? shorten_row<T>(s.q[stage][0], Shared::kTiles, t) : 1.f);
      }
      f.key_unit.set(t, key_unit);
    }
    const float kk = x.key_square;
    const float key_scale = a.qk_l2norm ? rsqrtf(kk + 1e-6f) : 1.f;
    const float lambda = a.qk_l2norm ? kk / (kk + 1e-6f) : kk;
    const float unit = rule_unit(f);
    Token token{};
    token.norm = kk > 0.f ? sqrtf(lambda) : 1.f;
    StepCoefficients<float> c{0.f, 0.f, 0.f};
    if (t < tokens) {
      c = key_coefficients(a.rule, x.beta, lambda, unit, kDecay, x.log_decay);
      token.slopes = key_slopes(a.rule, x.beta, lambda, unit, kDecay, x.log_decay);
    }
    const float query = a.scale * (a.qk_l2norm ? rsqrtf(x.query_square + 1e-6f) : 1.f);
    const float row = -token.norm * key_scale;
    float gamma = 1.f, z = c.erase * row;
    if constexpr (kDecay) {
      float sum = c.log_gate;
#pragma unroll
      for (int offset = 1; offset < 16; offset *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, sum, offset);
        if (lane % 16 >= offset) sum += other;
      }
      const float head = expf(sum), column = key_scale / token.norm;
      const float tail = expf(__shfl_sync(0xffffffffu, sum, lane | 15) - sum);
      if (lane % 16 == 15) f.block_gate[t / 16] = head;
      sync();
      const GateFactors gates(f.block_gate);
      gamma = gates.between(-1, t / 16) * head;
      f.gate[t] = sum;
      f.head[t] = head;
      f.query_head[t] = query * head;
      f.column[t] = column;
      f.column_tail[t] = tail * column;
      z *= gamma;
      const float least = fmaxf(0x1p-60f * fabsf(z), 0x1p-100f);
      const float out = fmaxf(gates.between(t / 16, 4) * tail * column, least);
      f.x[t] = out;
      z /= out;
    }
    f.row[t] = row;
    f.symmetric[t] = c.erase * row;
    f.query[t] = query;
    f.key[t] = key_scale;
    f.z[t] = z;
    if constexpr (kDecay) f.y[t] = query * gamma;
    token.through_norm = -gamma * row;
    token.erase = c.erase;
    return token;
  }

  __device__ __forceinline__ void store(const MutableView& view, int64_t begin, float value) const {
    if (view.data) {
      static_cast<float*>(
          view.data)[p.row * view.batch + (begin + t) * view.token + p.hv * view.head] = value;
    }
  }

  // de, dw through the step rule; 2 dlambda goes on the diagonal of (B + B^T). With decay what
  // passes through the gate is still to be added.
  __device__ __forceinline__ StepInputGradients<float> finish_step(const Token& x,
                                                                   const TokenFactors& f,
                                                                   float grad_erase,
                                                                   float write_dot) {
    const auto g = key_gradients(x.slopes, {0.f, grad_erase, x.norm * write_dot});
    if constexpr (kErase) {
      const float key_scale = f.key[t];
      *reinterpret_cast<T*>(s.pairs[2] + tile_offset(t, t)) =
          T(2.f * g.lambda * key_scale * key_scale);
      fence_async_proxy();
    }
    return g;
  }

  // L's row sum of this token, which both warpgroups of the chain may have a part of.
  __device__ __forceinline__ float lower_sum() const {
    float sum = s.sums.lower[t];
    if (Shared::kTiles == 2 && t >= kC / 2) sum += lower_rows(s.sums, 1)[t];
    return sum;
  }

  // Without decay.
  __device__ __forceinline__ void finish(const Token& x, const TokenFactors& f, int64_t begin,
                                         int tokens, float write_dot) {
    float grad_erase = 0.f;
    if constexpr (kErase) grad_erase = lower_sum() - x.through_norm * s.sums.zk[t];
    const auto g = finish_step(x, f, grad_erase, write_dot);
    s.diagonal_full.arrive();  // the sums have been read, too
    if (t >= tokens) return;
    store(a.grad_beta, begin, g.beta);
    store(a.grad_log_decay, begin, g.log_decay);
  }

  // With decay: dK waits for the diagonal alone, which the log gates' gradients are no part of.
  // `through` is <S, dS> behind the chunk.
  __device__ __forceinline__ void finish_gated(const Token& x, const TokenFactors& f, int64_t begin,
                                               int tokens, float write_dot, float through,
                                               uint32_t round) {
    float grad_erase = 0.f, gate = 0.f;
    if constexpr (kErase) {
      grad_erase = lower_sum();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i >= t / 16) gate -= s.sums.columns[i][t];
      }
      s.erased_full.wait(round);
      grad_erase -= x.through_norm * s.sums.zk[t];
      gate += x.erase * grad_erase;
    }
    const auto g = finish_step(x, f, grad_erase, write_dot);
    if constexpr (kErase) s.diagonal_full.arrive();
    s.sums_full.wait(round);
    gate += s.sums.query[t] - s.sums.key[t];
    s.sums_free.arrive();
    // From this token to the chunk's last.
    const float2 gates = sum_halves(gate, s.halves[round]);
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float other = __shfl_down_sync(0xffffffffu, gate, offset);
      if (lane + offset < 32) gate += other;
    }
    if (t >= tokens) return;
    gate += (t < 32 ? gates.y : 0.f) + through;
    store(a.grad_beta, begin, g.beta);
    store(a.grad_log_decay, begin, g.log_decay + gate * x.slopes.log_gate);
  }

  // Brings v of this token nearer.
  __device__ __forceinline__ void send_for_values(int step) const {
    const int chunk = reversed(chunks_of(p), step);
    if (t >= tokens_of(p, chunk)) return;
    const T* v = element<T>(a.v, p.row, p.begin + int64_t{chunk} * kC + t, p.hv);
#pragma unroll
    for (int n = 0; n < Shared::kTiles; ++n) {
      if (64 * n < a.value_dim) asm volatile("prefetch.global.L2 [%0];" ::"l"(v + 64 * n));
    }
  }

  // Up to the factors of the chunk of `step`.
  __device__ __forceinline__ Token prepare(int step) {
    static_assert(Shared::kStages == 2);
    const int stage = step % 2, chunk = reversed(chunks_of(p), step), tokens = tokens_of(p, chunk);
    const Input x = read_input(chunk);
    send_for_values(step);
    s.tokens_full[stage].wait(step / 2 & 1);
    if (tokens < kC) s.cleared.wait(0);
    s.factors_free[stage].wait((step / 2 & 1) ^ 1);
    const Token token = make_factors(x, stage, s.factors[stage], tokens);
    s.factors_full[stage].arrive();
    arrive_warp(s.tokens_free[stage]);
    return token;
  }

  __device__ __forceinline__ void walk() {
    Token token{};
#pragma unroll 1
    for (int step = -1; step < chunks_of(p); ++step) {
      hide(t);  // or addresses are kept across chunks, and spill
      // The next chunk's factors first: this one's sums are a while in coming.
      Token next{};
      if (step + 1 < chunks_of(p)) next = prepare(step + 1);
      if (step >= 0) finish_chunk(token, step);
      token = next;
    }
  }

  // From what the chunk's products left.
  __device__ __forceinline__ void finish_chunk(const Token& token, int step) {
    const uint32_t round = step & 1;
    const int chunk = reversed(chunks_of(p), step);
    const int64_t begin = p.begin + int64_t{chunk} * kC;
    const TokenFactors& f = s.factors[step % 2];
    s.write_dot_full[step % 2].wait(step / 2 & 1);
    float write_dot = s.write_dot[step % 2][0][t];
#pragma unroll
    for (int n = 1; n < Shared::kTiles; ++n) write_dot += s.write_dot[step % 2][n][t];
    float through = 0.f;
    if constexpr (kDecay) {
      for (const float part : s.through[step % 2]) through += part;
    }
    // Where the chain may be a chunk ahead it could come back to these before the tokens'
    // warpgroup, which waits for what is made of them.
    if constexpr (Shared::kKept == 2) s.grad_state_free[step % 2].arrive();
    if constexpr (kErase) s.lower_full.wait(round);
    if constexpr (kDecay) {
      finish_gated(token, f, begin, tokens_of(p, chunk), write_dot, through, round);
    } else {
      s.sums_full.wait(round);
      finish(token, f, begin, tokens_of(p, chunk), write_dot);
    }
  }
};

}  // namespace efla::cuda::sm90
