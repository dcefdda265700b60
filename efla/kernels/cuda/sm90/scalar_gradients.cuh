// The warps of the backward walk that own the scalars, a thread per token of the chunk: the step
// rule's coefficients for token_gradients.cuh, dV = w dR and then, from the sums that come back,
// the gradients of beta and log_decay.
#pragma once

#include "efla/kernels/cuda/sm90/backward_shared.cuh"

namespace efla::cuda::sm90 {

template <typename T, bool kDecay>
struct ScalarGradients {
  const ChunkArgs& a;
  GradientShared& s;
  const Place& p;
  int t, lane;                        // token of the chunk; lane of the warp
  float beta = 0.f, log_decay = 0.f;  // of this chunk's token
  float lambda = 0.f, total = 0.f;    // |k|^2; G_C

  static __device__ __forceinline__ void sync() { sync_threads(3, 32 * kScalarWarps); }

  // Starts on a chunk: its tokens' inputs, and v on its way into the cache.
  __device__ __forceinline__ void begin(int chunk) {
    const int64_t token = p.begin + int64_t{chunk} * kC + t;
    beta = log_decay = 0.f;
    if (t >= tokens_of(p, chunk)) return;
    beta = *element<float>(a.beta, p.row, token, p.hv);
    if constexpr (kDecay) log_decay = *element<float>(a.log_decay, p.row, token, p.hv);
    const T* v = element<T>(a.v, p.row, token, p.hv);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(v));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(v + 64));
  }

  // Both halves' sums of x over the chunk's tokens; `slot` of s.halves is this sum's own.
  __device__ __forceinline__ float2 sum_halves(float x, int slot) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    if (lane == 0) s.halves[2 * slot + t / 32] = x;
    sync();
    return make_float2(s.halves[2 * slot], s.halves[2 * slot + 1]);
  }

  // As make_scalars of the portable kernels; but inverse_norm is 1 / |k| of what the step rule
  // sees.
  __device__ __forceinline__ void make_factors(int stage, TokenFactors& f, int tokens) {
    const float kk = square_of_row<T>(s.k[stage][0], 2, t);
    const float qq = a.qk_l2norm ? square_of_row<T>(s.q[stage][0], 2, t) : 0.f;
    lambda = a.qk_l2norm ? kk / (kk + 1e-6f) : kk;
    const float norm = kk > 0.f ? sqrtf(lambda) : 1.f;
    StepCoefficients<float> c{0.f, 0.f, 0.f};
    if (t < tokens) c = step_coefficients(a.rule, beta, lambda, kDecay, log_decay);
    float sum = 0.f, gamma = 1.f, out = 1.f;
    if constexpr (kDecay) {
      sum = c.log_gate;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, sum, offset);
        if (lane >= offset) sum += other;
      }
      if (lane == 31) s.halves[t / 32] = sum;
      sync();
      total = s.halves[0] + s.halves[1];
      if (t >= 32) sum += s.halves[0];
      gamma = expf(sum), out = expf(total - sum);
    }
    f.norm[t] = norm;
    f.inverse_norm[t] = 1.f / norm;
    f.key_scale[t] = a.qk_l2norm ? rsqrtf(kk + 1e-6f) : 1.f;
    f.query[t] = a.scale * (a.qk_l2norm ? rsqrtf(qq + 1e-6f) : 1.f);
    f.erase[t] = c.erase;
    f.cumulative[t] = sum;
    f.z[t] = -c.erase * gamma * norm;
    f.x[t] = out / norm;
    f.y[t] = a.scale * gamma;
  }

  // <S, dS> of the states on both sides of the chunk, this thread's part.
  __device__ __forceinline__ float state_product() const {
    const auto* x = reinterpret_cast<const uint4*>(s.state);
    const auto* y = reinterpret_cast<const uint4*>(s.grad_state);
    float sum = 0.f;
#pragma unroll 4
    for (int i = t; i < kDim * kDim / 8; i += 32 * kScalarWarps) sum += dot<T>(x[i], y[i]);
    return sum;
  }

  // de, dw, dG, then through the step rule.
  __device__ __forceinline__ void finish(const TokenFactors& f, int64_t begin, int tokens,
                                         float write_dot, float states) {
    const float gamma = kDecay ? expf(f.cumulative[t]) : 1.f;
    const float key_scale = f.key_scale[t], norm = f.norm[t], erase = f.erase[t];
    const float zk = norm * key_scale * s.sums.zk[t];
    const float grad_erase = s.sums.pairs[0][t] - gamma * zk;
    float grad_gate = 0.f;
    if constexpr (kDecay) {
      float columns[2] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        columns[0] += s.sums.columns[0][i][t];
        columns[1] += s.sums.columns[1][i][t];
      }
      const float yq = f.query[t] * gamma * s.sums.yq[t];
      const float xk = key_scale * s.sums.xk[t];
      float gate = erase * s.sums.pairs[0][t] - columns[0] + s.sums.pairs[1][t] - columns[1] + yq -
                   erase * gamma * zk - xk;
      // From this token to the chunk's last, and what the whole chunk lets through.
      const float2 through = sum_halves(xk + expf(total) * states, 1);
      const float2 gates = sum_halves(gate, 2);
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const float other = __shfl_down_sync(0xffffffffu, gate, offset);
        if (lane + offset < 32) gate += other;
      }
      grad_gate = gate + (t < 32 ? gates.y : 0.f) + through.x + through.y;
    }
    const auto g = step_coefficients_backward(a.rule, beta, lambda, kDecay, log_decay,
                                              {grad_gate, grad_erase, norm * write_dot});
    s.key_factor[t] = 2.f * g.lambda * key_scale;
    s.key_factor_full.arrive();
    if (t >= tokens) return;
    const auto store = [&](const MutableView& view, float value) {
      if (view.data) {
        static_cast<float*>(
            view.data)[p.row * view.batch + (begin + t) * view.token + p.hv * view.head] = value;
      }
    };
    store(a.grad_beta, g.beta);
    store(a.grad_log_decay, g.log_decay);
  }

  __device__ __forceinline__ void walk() {
    const int chunks = chunks_of(p);
    Ring<GradientShared::kStages> ring;
    if (chunks > 0) begin(reversed(chunks, 0));
#pragma unroll 1
    for (int step = 0; step < chunks; ++step, ring.advance()) {
      const int i = ring.index, chunk = reversed(chunks, step), tokens = tokens_of(p, chunk);
      const uint32_t round = step & 1;
      const int64_t first = p.begin + int64_t{chunk} * kC;
      TokenFactors& f = s.factors[step % 2];
      hide(t);  // or addresses are kept across chunks, and spill
      s.tokens_full[i].wait(ring.round);
      if (tokens < kC) s.cleared.wait(0);
      s.factors_free[step % 2].wait((step / 2 & 1) ^ 1);
      make_factors(i, f, tokens);
      s.factors_full[step % 2].arrive();
      sync();  // also: both warps are done with the chunk before
      arrive_warp(s.tokens_free[i]);
      float states = 0.f;
      if constexpr (kDecay) {
        s.state_full.wait(round);
        s.grad_state_full.wait(round);
        states = state_product();
        arrive_warp(s.state_free);
        arrive_warp(s.grad_state_free);
      }
      s.write_dot_full.wait(round);
      const float write_dot = s.write_dot[round][0][t] + s.write_dot[round][1][t];
      s.sums_full.wait(round);
      finish(f, first, tokens, write_dot, states);
      if (step + 1 < chunks) begin(chunk - 1);
    }
  }
};

}  // namespace efla::cuda::sm90
