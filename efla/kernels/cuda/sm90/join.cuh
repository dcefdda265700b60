// Joins the parts of split sequences: S_p+1 = M_p S_p + N_p, part after part in float, and for the
// backward dS_p = M_p^T dS_p+1 + N'_p from the last part to the first. Nothing is dropped: the
// exact flow without a gate forgets nothing that a later part could do without.
#pragma once

#include "efla/kernels/cuda/sm90/chunk.cuh"

namespace efla::cuda::sm90 {

inline constexpr int kJoinColumns = 16;   // of V per block
inline constexpr int kJoinThreads = 256;  // one block per multiprocessor: registers for 32 loads

// grid (sequences * HV, V / kJoinColumns). Writes what each part's walk starts from to `states`:
// the state before the part, or (kReverse) dS behind it. What leaves the sequence at the other end
// comes from the walk of its last (first) part, but from here for empty sequences, which have no
// part.
template <int kK, bool kReverse>
__global__ void __launch_bounds__(kJoinThreads, 1)
    join_kernel(const ScanArgs args, float* states, int64_t slots) {
  constexpr int kRows = kK / 32;  // per thread
  __shared__ __align__(16) float state[2][kK][kJoinColumns];
  const ChunkArgs& a = args.common;
  const int64_t sequence = blockIdx.x / a.value_heads;
  const int hv = static_cast<int>(blockIdx.x % a.value_heads);
  int64_t first, tokens = a.tokens;
  if (a.cu_seqlens) {
    first = sequence + a.cu_seqlens[sequence] / args.part_tokens;
    tokens = a.cu_seqlens[sequence + 1] - a.cu_seqlens[sequence];
  } else {
    first = sequence * ((a.tokens + args.part_tokens - 1) / args.part_tokens);
  }
  const int parts =
      static_cast<int>((max(tokens, int64_t{0}) + args.part_tokens - 1) / args.part_tokens);
  const int row = threadIdx.x / 8 * kRows, column = threadIdx.x % 8 * 2;
  const int64_t size = int64_t{kK} * a.value_dim, offset = blockIdx.y * kJoinColumns + column;
  const float* entering = kReverse ? a.grad_final_state : a.initial_state;
  float* leaving = kReverse ? a.grad_initial_state : a.final_state;
  float2 x[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    x[i] = make_float2(0.f, 0.f);
    if (entering) {
      x[i] = *reinterpret_cast<const float2*>(entering + (sequence * a.value_heads + hv) * size +
                                              (row + i) * a.value_dim + offset);
    }
  }
  for (int step = 0; step < parts; ++step) {
    const int p = kReverse ? parts - 1 - step : step;
    const int64_t place = ((first + p) * a.value_heads + hv) * size;
    auto& s = state[step % 2];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      *reinterpret_cast<float2*>(&s[row + i][column]) = x[i];
      *reinterpret_cast<float2*>(states + place + (row + i) * a.value_dim + offset) = x[i];
    }
    if (step + 1 == parts) break;
    __syncthreads();
    const float* add = args.part_results + place;
    const float* transition = args.part_results + slots * a.value_heads * size + place;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      x[i] = *reinterpret_cast<const float2*>(add + (row + i) * a.value_dim + offset);
    }
    if (step == 0) continue;  // its walk began with what enters
    if constexpr (kReverse) {
      using Rows = std::conditional_t<kRows == 4, float4, float2>;
      static_assert(sizeof(Rows) == kRows * sizeof(float));
#pragma unroll 32
      for (int k = 0; k < kK; ++k) {  // row k of M is column k of M^T
        alignas(Rows) float m[kRows];
        *reinterpret_cast<Rows*>(m) = *reinterpret_cast<const Rows*>(transition + k * kK + row);
        const float2 y = *reinterpret_cast<const float2*>(&s[k][column]);
#pragma unroll
        for (int i = 0; i < kRows; ++i) x[i].x += m[i] * y.x, x[i].y += m[i] * y.y;
      }
    } else {
#pragma unroll 8
      for (int k = 0; k < kK; k += 4) {
        float2 y[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) y[j] = *reinterpret_cast<const float2*>(&s[k + j][column]);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const float4 m = *reinterpret_cast<const float4*>(transition + (row + i) * kK + k);
          x[i].x += m.x * y[0].x + m.y * y[1].x + m.z * y[2].x + m.w * y[3].x;
          x[i].y += m.x * y[0].y + m.y * y[1].y + m.z * y[2].y + m.w * y[3].y;
        }
      }
    }
  }
  if (parts == 0 && leaving) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      *reinterpret_cast<float2*>(leaving + (sequence * a.value_heads + hv) * size +
                                 (row + i) * a.value_dim + offset) = x[i];
    }
  }
}

}  // namespace efla::cuda::sm90
