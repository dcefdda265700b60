// Joins the parts of split sequences: S_p+1 = M_p S_p + N_p, part after part in float, and for the
// backward dS_p = M_p^T dS_p+1 + N'_p from the last part to the first. Nothing is dropped: the
// exact flow without a gate forgets nothing that a later part could do without.
#pragma once

#include "efla/kernels/cuda/sm90/chunk.cuh"

namespace efla::cuda::sm90 {

inline constexpr int kJoinColumns = 8;  // of V per block

template <int kK>
inline constexpr int kJoinThreads = 2 * kK;

template <int kK>
struct JoinShared {
  float transition[2][kK][kK + 4];               // M of this part and the next
  float state[2][kK / 4][4 * kJoinColumns + 8];  // rows by fours
};

// grid (sequences * HV, kK / kJoinColumns), for K and V padded to kK. Writes what each part's walk
// starts from to `states`: the state before the part, or (kReverse) dS behind it. What leaves the
// sequence at the other end comes from the walk of its last (first) part, but from here for empty
// sequences, which have no part. Four neighbouring lanes make the same 4 x 4 elements from a
// quarter of the sum each.
template <int kK, bool kReverse>
__global__ void __launch_bounds__(kJoinThreads<kK>)
    join_kernel(const ScanArgs args, float* states) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto& s = *reinterpret_cast<JoinShared<kK>*>(shared_bytes);
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
  const int quarter = threadIdx.x % 4, rows = threadIdx.x / 8;  // of the sum; of four
  const int column = threadIdx.x / 4 % 2 * 4, row = 4 * rows + quarter;
  const int value = blockIdx.y * kJoinColumns + column;  // of V
  const int64_t size = int64_t{kK} * kK, offset = row * kK + value;
  const auto place = [&](int step) {
    return ((first + (kReverse ? parts - 1 - step : step)) * a.value_heads + hv) * size;
  };
  // Starts copying the transition of a step; the first has none, its walk began with what enters.
  const auto fetch = [&](int step) {
    if (step > 0 && step + 1 < parts) {
      const float* m = args.transitions + place(step);
      for (int i = threadIdx.x; i < kK * kK / 4; i += kJoinThreads<kK>) {
        copy_async_16(&s.transition[step % 2][i / (kK / 4)][i % (kK / 4) * 4], m + 4 * i, true);
      }
    }
    commit_copies();
  };
  const float* entering = kReverse ? a.grad_final_state : a.initial_state;
  float* leaving = kReverse ? a.grad_initial_state : a.final_state;
  const bool inside = row < a.key_dim && value < a.value_dim;
  const int64_t whole = ((sequence * a.value_heads + hv) * a.key_dim + row) * a.value_dim + value;
  float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
  if (entering && inside) x = *reinterpret_cast<const float4*>(entering + whole);
  fetch(1);
  for (int step = 0; step < parts; ++step) {
    *reinterpret_cast<float4*>(states + place(step) + offset) = x;
    if (step + 1 == parts) break;
    const float4 add = *reinterpret_cast<const float4*>(args.part_results + place(step) + offset);
    if (step == 0) {
      x = add;
      continue;
    }
    *reinterpret_cast<float4*>(&s.state[step % 2][rows][quarter * kJoinColumns + column]) = x;
    wait_copies<0>();
    __syncthreads();
    fetch(step + 1);  // all are done with its buffer's last one
    const auto& m = s.transition[step % 2];
    float sum[4][4] = {};
#pragma unroll 4
    for (int k = quarter; k < kK / 4; k += 4) {  // rows of the state by fours
      float4 y[4], c[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        y[j] = *reinterpret_cast<const float4*>(&s.state[step % 2][k][j * kJoinColumns + column]);
        // Row k of M is column k of M^T.
        c[j] = *reinterpret_cast<const float4*>(kReverse ? &m[4 * k + j][4 * rows]
                                                         : &m[4 * rows + j][4 * k]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float4& from = c[kReverse ? j : i];
          const int at = kReverse ? i : j;
          const float w = at == 0 ? from.x : at == 1 ? from.y : at == 2 ? from.z : from.w;
          sum[i][0] += w * y[j].x, sum[i][1] += w * y[j].y;
          sum[i][2] += w * y[j].z, sum[i][3] += w * y[j].w;
        }
      }
    }
    // Each lane gets the row of its quarter.
    float two[2][4], one[4];
    const bool high = (quarter & 2) != 0, odd = (quarter & 1) != 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        two[i][c] = high ? sum[2 + i][c] : sum[i][c];
        two[i][c] += __shfl_xor_sync(0xffffffffu, high ? sum[i][c] : sum[2 + i][c], 2);
      }
      one[c] = odd ? two[1][c] : two[0][c];
      one[c] += __shfl_xor_sync(0xffffffffu, odd ? two[0][c] : two[1][c], 1);
    }
    x = make_float4(add.x + one[0], add.y + one[1], add.z + one[2], add.w + one[3]);
  }
  wait_copies<0>();
  if (parts == 0 && leaving && inside) *reinterpret_cast<float4*>(leaving + whole) = x;
}

}  // namespace efla::cuda::sm90
