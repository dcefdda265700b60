// The scalars' gradients of one chunk, from the row and column sums that a block of
// chunk_gradients.cuh leaves in shared memory.
#pragma once

#include "efla/kernels/cuda/portable/chunk_gradients_shared.cuh"

namespace efla::cuda {

template <typename T, int kK, int kC>
__device__ __forceinline__ float total_dot(const GradientShared<T, kK, kC>& s, int which, int t) {
  float sum = 0.f;
  for (int w = 0; w < GradientShared<T, kK, kC>::kColumnWarps; ++w) sum += s.dot[which][w][t];
  return sum;
}

// What multiplies the rows of Z, X and Y in dK and dQ. Called by the first kC threads, one per
// token.
template <typename T, int kK, int kC>
__device__ void make_factors(const ChunkArgs& a, GradientShared<T, kK, kC>& s) {
  const TokenScalars<kC, Gate<T>>& w = s.scalars;
  const int t = threadIdx.x;
  const float gamma = exp_gate(w.cumulative[t]), out = exp_gate(w.total - w.cumulative[t]);
  s.z_factor[t] = -w.erase[t] * gamma * w.norm[t];
  s.x_factor[t] = out / w.norm[t];
  s.y_factor[t] = a.scale * gamma;
  s.out_norm[t] = 1.f / w.norm[t];
}

// de, dw, dG, then through the step rule to dbeta and dlog_decay, which it writes, and dlambda,
// which goes to k_factor. Called by the whole block; one thread per token.
template <typename T, int kK, int kC>
__device__ void finish_scalars(const ChunkArgs& a, GradientShared<T, kK, kC>& s, const Chunk& chunk,
                               int hv) {
  using Shared = GradientShared<T, kK, kC>;
  const TokenScalars<kC, Gate<T>>& w = s.scalars;
  const bool has_decay = a.log_decay.data != nullptr;
  const int t = threadIdx.x;
  float grad_erase = 0.f;
  if (t < kC) {
    const float gamma = exp_gate(w.cumulative[t]), out = exp_gate(w.total - w.cumulative[t]);
    const float zk = w.norm[t] * w.key_scale[t] * total_dot(s, 0, t);
    float rows[2] = {};
    for (int i = 0; i < Shared::kColumnWarps; ++i) {
      rows[i >= Shared::kColumnWarps / 2] += s.row_sum[i][t];
    }
    grad_erase = rows[0] - gamma * zk;
    if (has_decay) {
      const float yq = w.query[t] * gamma * total_dot(s, 1, t);
      const float xk = out * w.key_scale[t] / w.norm[t] * total_dot(s, 2, t);
      float columns[2] = {};
      for (int i = 0; i < Shared::kRowWarps; ++i) {
        columns[0] += s.column_sum[0][i][t];
        columns[1] += s.column_sum[1][i][t];
      }
      s.grad_gate[t] = w.erase[t] * rows[0] - columns[0] + rows[1] - columns[1] + yq -
                       w.erase[t] * gamma * zk - xk;
      s.out_dot[t] = xk;
    }
  }
  if (has_decay) __syncthreads();
  if (t >= kC) return;
  Gate<T> grad_gate = 0;
  if (has_decay) {  // nobody else asks for it
    for (int i = 0; i < kC; ++i) grad_gate += s.out_dot[i] + (i >= t ? s.grad_gate[i] : 0.f);
    float states = 0.f;
    for (float part : s.state_dot) states += part;
    grad_gate += exp_gate(w.total) * states;
  }
  const auto g = key_coefficients_backward(
      a.rule, w.beta[t], w.lambda[t], rule_unit(a, w, t), has_decay, w.log_decay[t],
      {static_cast<float>(grad_gate), grad_erase, w.norm[t] * s.write_dot[t]});
  s.k_factor[t] = 2.f * g.lambda * w.key_scale[t];
  if (t >= chunk.tokens) return;
  const auto put = [&](const MutableView& view, float value) {
    if (view.data) {
      static_cast<float*>(
          view.data)[chunk.row * view.batch + (chunk.begin + t) * view.token + hv * view.head] =
          value;
    }
  };
  put(a.grad_beta, g.beta);
  put(a.grad_log_decay, g.log_decay);
}

}  // namespace efla::cuda
