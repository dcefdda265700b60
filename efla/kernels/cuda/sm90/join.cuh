// Joins the parts of split sequences: S_p+1 = M_p S_p + N_p, part after part, and for the backward
// dS_p = M_p^T dS_p+1 + N'_p from the last part to the first. Nothing is dropped: the exact flow
// without a gate forgets nothing that a later part could do without. The products are TF32 x 3 as
// in portable/mma.cuh, with an error of about 1e-6.
#pragma once

#include "efla/kernels/cuda/portable/mma.cuh"
#include "efla/kernels/cuda/sm90/chunk.cuh"

namespace efla::cuda::sm90 {

inline constexpr int kJoinColumns = 16;  // of V per block

template <int kK>
inline constexpr int kJoinThreads = 2 * kK;

template <int kK, bool kReverse>
struct JoinShared {
  // M of this part and the next; padded so that a warp's reads fall into different banks.
  float transition[2][kK][kK + (kReverse ? 8 : 16)];
  // S^T as A operands of 8 inner elements each: for every lane of a warp its four numbers.
  uint4 head[2][kK / 8][32], tail[2][kK / 8][32];
};

// The products' inner elements are permuted so that what a lane needs of 16 lies together in M, or
// in reverse falls into different banks: lane 4 g + t has 4 t + (0 to 3), or t + 4 (0 to 3).
// Writes row `row` of S, columns g (x) and g + 8 (y), where the operands have it.
template <bool kReverse, int kSteps>
__device__ __forceinline__ void write_operand(uint4 (&operand)[kSteps][32], int row, int g,
                                              uint32_t x, uint32_t y) {
  const int t = kReverse ? row % 4 : row % 16 / 4, n = kReverse ? row % 16 / 4 : row % 4;
  auto* pairs = reinterpret_cast<uint2*>(&operand[row / 16 * 2 + n / 2][4 * g + t]);
  pairs[n % 2] = make_uint2(x, y);
}

// grid (sequences * HV, kK / kJoinColumns), for K and V padded to kK. Writes what each part's walk
// starts from to `states`: the state before the part, or (kReverse) dS behind it. What leaves the
// sequence at the other end comes from the walk of its last (first) part, but from here for empty
// sequences, which have no part. A warp makes 16 rows of K: S^T [16, kK] M^T, or in reverse S^T M.
template <int kK, bool kReverse>
__global__ void __launch_bounds__(kJoinThreads<kK>)
    join_kernel(const ScanArgs args, float* states) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto& s = *reinterpret_cast<JoinShared<kK, kReverse>*>(shared_bytes);
  wait_for_stream();
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
  const auto place = [&](int step) {
    return ((first + (kReverse ? parts - 1 - step : step)) * a.value_heads + hv) * kK * kK;
  };
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // This lane's elements, as in C fragments: of tile j rows r + 8 j and the next, columns of the
  // block g and g + 8.
  const int r = 16 * warp + 2 * t, value = blockIdx.y * kJoinColumns + g;
  const auto each = [&](CFragment(&x)[2], auto visit) {
#pragma unroll
    for (int n = 0; n < 8; ++n) visit(x[n / 4][n % 4], r + n / 4 * 8 + n % 2, n % 4 / 2 * 8);
  };
  const auto read_results = [&](CFragment(&x)[2], int step) {
    const float* from = args.part_results + place(step) + value;
    each(x, [&](float& y, int row, int column) { y = from[row * kK + column]; });
  };
  const auto write_state = [&](CFragment(&x)[2], int step) {
    float* to = states + place(step) + value;
    each(x, [&](float& y, int row, int column) { to[row * kK + column] = y; });
  };
  // Starts copying the transition of a step; the first has none, its walk began with what enters,
  // nor has the last.
  const auto fetch = [&](int step) {
    if (step + 1 < parts) {
      const float* m = args.transitions + place(step);
#pragma unroll
      for (int i = 0; i < kK * kK / 4 / kJoinThreads<kK>; ++i) {
        const int n = threadIdx.x + i * kJoinThreads<kK>;
        copy_async_16(&s.transition[step % 2][n / (kK / 4)][n % (kK / 4) * 4], m + 4 * n, true);
      }
    }
    commit_copies();
  };
  const float* entering = kReverse ? a.grad_final_state : a.initial_state;
  float* leaving = kReverse ? a.grad_initial_state : a.final_state;
  const int64_t whole = (sequence * a.value_heads + hv) * a.key_dim;
  const auto inside = [&](int row, int column) {
    return row < a.key_dim && value + column < a.value_dim;
  };

  fetch(1);
  CFragment x[2] = {};
  if (entering) {
    each(x, [&](float& y, int row, int column) {
      if (inside(row, column)) y = entering[(whole + row) * a.value_dim + value + column];
    });
  }
  if (parts > 0) write_state(x, 0);
  if (parts > 1) {
    read_results(x, 0);
    write_state(x, 1);
  }
#pragma unroll 1
  for (int step = 1; step + 1 < parts; ++step) {
    CFragment add[2];
    read_results(add, step);
    auto &head = s.head[step % 2], &tail = s.tail[step % 2];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float y0 = x[n / 2][n % 2], y1 = x[n / 2][n % 2 + 2];
      const uint32_t most0 = to_tf32(y0), most1 = to_tf32(y1);
      const int row = r + n / 2 * 8 + n % 2;
      write_operand<kReverse>(head, row, g, most0, most1);
      write_operand<kReverse>(tail, row, g, __float_as_uint(y0 - __uint_as_float(most0)),
                              __float_as_uint(y1 - __uint_as_float(most1)));
    }
    wait_copies<0>();
    __syncthreads();  // all are done with the step before
    fetch(step + 1);
    const auto& m = s.transition[step % 2];
    CFragment sum[2][2] = {};  // of each tile two chains, half as long
#pragma unroll
    for (int i = 0; i < kK / 16; ++i) {
      uint32_t most[2][4], rest[2][4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        // B: inner elements 16 i + 4 t + (0 to 3), or 16 i + t + 4 (0 to 3), of one column.
        const int column = 16 * warp + 8 * j + g;
        float b[4];
        if constexpr (kReverse) {
#pragma unroll
          for (int n = 0; n < 4; ++n) b[n] = m[16 * i + t + 4 * n][column];
        } else {
          *reinterpret_cast<float4*>(b) =
              *reinterpret_cast<const float4*>(&m[column][16 * i + 4 * t]);
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          most[j][n] = to_tf32(b[n]);
          rest[j][n] = __float_as_uint(b[n] - __uint_as_float(most[j][n]));
        }
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint4 h = head[2 * i + n][lane], l = tail[2 * i + n][lane];
        const uint32_t left[4] = {h.x, h.y, h.z, h.w}, left_rest[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32_t right[2] = {most[j][2 * n], most[j][2 * n + 1]};
          mma_tf32(sum[n][j], left_rest, right);
          mma_tf32(sum[n][j], left, {rest[j][2 * n], rest[j][2 * n + 1]});
          mma_tf32(sum[n][j], left, right);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      x[n / 4][n % 4] = add[n / 4][n % 4] + (sum[0][n / 4][n % 4] + sum[1][n / 4][n % 4]);
    }
    write_state(x, step + 1);
  }
  wait_copies<0>();
  if (parts == 0 && leaving) {
    each(x, [&](float& y, int row, int column) {
      if (inside(row, column)) leaving[(whole + row) * a.value_dim + value + column] = y;
    });
  }
}

}  // namespace efla::cuda::sm90
