// What a chunk needs beside the state, made one or two chunks ahead of the warpgroups that hold it
// (scan_prepare.cuh says by whom).
//
//   L_hat_ti = e_hat_t D_ti (k_hat_t . k_hat_i), i < t        A_hat = (I + L_hat)^-1
//   (forward in bfloat16: without D, and both times |k_i| / |k_t|, where chunks are mild, below)
//   P_hat_ti = scale D_ti (q_t . k_hat_i), i <= t      (its tile holds P_hat^T)
//
// as in the portable chunk_prepare.cuh (same notation), from tiles that are in shared memory
// already, results to swizzled tiles there.
#pragma once

#include "efla/kernels/cuda/sm90/chunk_scalars.cuh"

namespace efla::cuda::sm90 {

// Starts d = X K^T for tiles x and k of the chunk, for kColumns of k's rows.
template <typename T, int kK, int kColumns = kC>
__device__ __forceinline__ void multiply_keys(float (&d)[kColumns / 2], const unsigned char* x,
                                              const unsigned char* k) {
  fence_products();
#pragma unroll
  for (int i = 0; i < kK / 16; ++i) {
    const int offset = i / 4 * (kC * 128 / 16) + i % 4 * 2;
    product_shared<T>(d, describe_rows(x) + offset, describe_rows(k) + offset, i > 0);
  }
  commit_products();
}

// L_hat from K K^T, row factor times column factor (where keys are wide) times D_ti.
template <bool kDecay>
__device__ __forceinline__ void store_lower(LowerTriangle& s, const RowFactors& f,
                                            const RowScalars& rows, const float (&product)[32],
                                            int warp, int thread) {
  const int lane = thread % 32;
  const int r = lane / 4, t4 = lane % 4 * 2;
  const auto store = [&](int j, int h, float x, float y) {
    *reinterpret_cast<uint32_t*>(&s.below[16 * warp + 8 * h + r][8 * j + t4]) = half_pair(x, y);
  };
  const GateFactors gates = kDecay ? GateFactors(f.block_gate) : GateFactors();
  float kk[32];
#pragma unroll
  for (int n = 0; n < 32; ++n) kk[n] = product[n];
  if constexpr (!kDecay) {
    if (rows.wide) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j >= 2 * warp + 2) break;
        const float2 column = float_pair(f.column_scale, 8 * j + t4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          kk[4 * j + 2 * h] *= column.x, kk[4 * j + 2 * h + 1] *= column.y;
        }
      }
    }
  }
  // Columns of the 16-token blocks before this warp's own. Factors are read ahead of the writes:
  // the compiler cannot tell that they do not overlap.
#pragma unroll
  for (int j1 = 0; j1 < 6; j1 += 4) {
    if (j1 >= 2 * warp) break;
    const int count = min(4, 6 - j1);
    float2 column[4];
#pragma unroll
    for (int i = 0; i < count; ++i) {
      column[i] = kDecay ? float_pair(f.column_tail, 8 * (j1 + i) + t4) : make_float2(1.f, 1.f);
    }
#pragma unroll
    for (int i = 0; i < count; i += 2) {
      const int block = (j1 + i) / 2;
      if (block >= warp) break;
      const float between = kDecay ? gates.between(block, warp) : 1.f;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int j = j1 + i + n / 2, h = n % 2;
        const float row = kDecay ? rows.head[h] * between : rows.scale[h];
        store(j, h, row * column[i + n / 2].x * kk[4 * j + 2 * h],
              row * column[i + n / 2].y * kk[4 * j + 2 * h + 1]);
      }
    }
  }
#pragma unroll
  for (int w = 0; w < 4; ++w) {  // its own, of which the upper right block of 8 is zero
    if (warp != w) continue;
    float2 column[2], gate[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      column[i] = kDecay ? float_pair(f.column_scale, 16 * w + 8 * i + t4) : make_float2(1.f, 1.f);
      if constexpr (kDecay) gate[i] = float_pair(f.gate, 16 * w + 8 * i + t4);
    }
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      const int i = n / 2, h = (n + 1) / 2, j = 2 * w + i;  // column group, row group
      float x = rows.scale[h] * column[i].x * kk[4 * j + 2 * h];
      float y = rows.scale[h] * column[i].y * kk[4 * j + 2 * h + 1];
      if constexpr (kDecay) {
        x *= __expf(rows.gate[h] - gate[i].x), y *= __expf(rows.gate[h] - gate[i].y);
      }
      if (i < h) {
        store(j, h, x, y);
      } else {  // what lies above the diagonal is never read
        s.diagonal[j].column[t4][r] = x;
        s.diagonal[j].column[t4 + 1][r] = y;
      }
    }
  }
}

// P_hat transposed from kq = K Q^T: rows are keys, columns those of kColumns / 16 blocks of 16
// queries from `first` on. What lies below its diagonal is zero already. kFolded: without factors,
// with decay that part of D which the walk's factors leave over.
template <typename T, bool kDecay, int kColumns, bool kFolded = false>
__device__ __forceinline__ void store_scores(const RowFactors& f, const float (&key_out)[kC],
                                             const float (&kq)[kColumns / 2], unsigned char* scores,
                                             int first, int thread) {
  const int warp = thread / 32, lane = thread % 32;
  const int row = 16 * warp + lane / 4, t4 = lane % 4 * 2;
  const int offset = tile_offset(row, t4) ^ first << 5;
  if (first + kColumns / 16 <= warp) return;
  constexpr bool kFactors = kDecay || !kFolded;
  float scale[2] = {1.f, 1.f};
  if constexpr (kFactors) scale[0] = f.column_scale[row], scale[1] = f.column_scale[row + 8];
  const GateFactors gates = kDecay ? GateFactors(f.block_gate) : GateFactors();
  float tail[2] = {}, own[2] = {};
  if constexpr (kDecay) {
    tail[0] = f.column_tail[row], tail[1] = f.column_tail[row + 8];
    own[0] = f.gate[row], own[1] = f.gate[row + 8];
    if constexpr (kFolded) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float taken = 1.f / key_out[row + 8 * h];
        scale[h] *= taken, tail[h] *= taken;
      }
    }
  }
#pragma unroll
  for (int b = 0; b < kColumns / 16; ++b) {
    const int block = first + b;
    if (block < warp) continue;
    const bool same = block == warp;
    float2 query[2], gate[2];  // read ahead of the writes, as above
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = 16 * block + 8 * i + t4;
      query[i] = make_float2(1.f, 1.f);
      if (kFactors) query[i] = float_pair(kDecay && !same ? f.query_head : f.query_scale, c);
      if (kDecay && same) gate[i] = float_pair(f.gate, c);
    }
    const float between = kDecay ? gates.between(warp, block) : 1.f;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int i = n / 2, h = n % 2, j = 2 * b + i;
      if (same && i < h) continue;
      const float factor = kDecay && !same ? tail[h] * between : scale[h];
      float x = factor * query[i].x * kq[4 * j + 2 * h];
      float y = factor * query[i].y * kq[4 * j + 2 * h + 1];
      if (kDecay && same) {
        x *= __expf(gate[i].x - own[h]), y *= __expf(gate[i].y - own[h]);
      }
      if (same && i == h) {
        if (t4 < lane / 4) x = 0.f;
        if (t4 + 1 < lane / 4) y = 0.f;
      }
      *reinterpret_cast<uint32_t*>(scores + ((offset ^ (j << 4)) + h * 1024)) = pack<T>(x, y);
    }
  }
}

}  // namespace efla::cuda::sm90
