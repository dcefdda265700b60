// The C x C operands of dQ and dK. P's, of rows i and columns t >= i, are made by the tokens'
// warpgroup; L's, of rows t and columns i < t, by those of the chain, each for its own columns,
// while they would wait for the tokens' anyway, and with them the row sums of D o dL o KK^T that de
// asks for. Equations and names are those of token_gradients.cuh.
//
// With decay D_ti is made as in GateFactors: off the diagonal blocks of 16 of factors of rows and
// columns. dlog_decay asks for the column sums of L's operand as well, and for both of D o dP o P,
// which are parts of q.dQ and k.dK: P's two operands have the same roundings.
#pragma once

#include "efla/kernels/cuda/sm90/backward_shared.cuh"

namespace efla::cuda::sm90 {

// The 16 rows of a warp of an accumulator, in blocks of 16 columns: eight registers of a thread,
// which become the four of an operand A.
template <typename T>
struct BlockRows {
  const int warp, lane;
  float sums[2] = {};  // of rows row(0) and row(1), this thread's part

  __device__ __forceinline__ int row(int h) const { return 16 * warp + lane / 4 + 8 * h; }
  __device__ __forceinline__ int column(int block, int j) const {
    return 16 * block + 8 * j + lane % 4 * 2;
  }

  // Without decay: x = pair by[row].
  __device__ __forceinline__ void make_plain(uint32_t (&x)[4], const float* pair, const float* gram,
                                             const float (&by)[2]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float u = pair[2 * n], v = pair[2 * n + 1];
      sums[n % 2] += u * gram[2 * n];
      sums[n % 2] += v * gram[2 * n + 1];
      x[n] = pack<T>(u * by[n % 2], v * by[n % 2]);
    }
  }

  // Off the diagonal: x = pair by[row] far[column]. Adds from[row] far[column] x pair x gram to the
  // rows' sums.
  __device__ __forceinline__ void make(uint32_t (&x)[4], float (&columns)[4], const float* pair,
                                       const float* gram, const float2 (&far)[2],
                                       const float (&by)[2], const float (&from)[2]) {
    float part[2] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = 4 * j + 2 * h;
        float u = pair[at] * far[j].x, v = pair[at + 1] * far[j].y;
        part[h] += u * gram[at];
        part[h] += v * gram[at + 1];
        u *= by[h], v *= by[h];
        add_columns(columns, j, u * gram[at], v * gram[at + 1], h == 0);
        x[2 * j + h] = pack<T>(u, v);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) sums[h] += from[h] * part[h];
  }

  // On it, calls f(at, h, u, v) for the elements at, at + 1 of row(h), where u and v are pair D
  // far[column]; D_ti is exp(own - gate) for rows t, or with kScores, where rows are i and columns
  // t >= i, exp(gate - own).
  template <bool kScores, typename F>
  __device__ __forceinline__ void visit_diagonal(const float* pair, const float2 (&far)[2],
                                                 const float2 (&gate)[2], const float (&own)[2],
                                                 F f) const {
    const int r = lane / 4, c = lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = 4 * j + 2 * h;
        float u = 0.f, v = 0.f;
        if (j == h || (j > h) == kScores) {
          const float to = own[h];
          u = pair[at] * far[j].x * fast_exp(kScores ? gate[j].x - to : to - gate[j].x);
          v = pair[at + 1] * far[j].y * fast_exp(kScores ? gate[j].y - to : to - gate[j].y);
          if (j == h) {
            if (kScores ? c < r : c >= r) u = 0.f;
            if (kScores ? c + 1 < r : c + 1 >= r) v = 0.f;
          }
        }
        f(at, h, u, v);
      }
    }
  }

  static __device__ __forceinline__ void add_columns(float (&columns)[4], int j, float u, float v,
                                                     bool first) {
    columns[2 * j] = first ? u : columns[2 * j] + u;
    columns[2 * j + 1] = first ? v : columns[2 * j + 1] + v;
  }

  // Sums over the warp's rows of columns 8 (n / 2) + 2 (lane % 4) + n % 2 of the block.
  __device__ __forceinline__ void keep_columns(float (&to)[kC], int block,
                                               const float (&x)[4]) const {
    const bool high = (lane & 16) != 0, odd = (lane & 8) != 0;
    float two[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      two[n] = high ? x[2 + n] : x[n];
      two[n] += __shfl_xor_sync(0xffffffffu, high ? x[n] : x[2 + n], 16);
    }
    float sum = odd ? two[1] : two[0];
    sum += __shfl_xor_sync(0xffffffffu, odd ? two[0] : two[1], 8);
    sum += __shfl_xor_sync(0xffffffffu, sum, 4);
    if ((lane & 4) == 0) to[16 * block + 8 * high + lane % 4 * 2 + odd] = sum;
  }

  // Where the four matrices of block 0 lie in a tile, and in its transpose. Those of another lie at
  // direct() ^ block << 5 and turned() + 2048 block.
  __device__ __forceinline__ uint32_t direct() const {
    return tile_offset(16 * warp + lane % 16, lane / 16 * 8);
  }
  __device__ __forceinline__ uint32_t turned() const {
    return tile_offset(lane / 16 * 8 + lane % 8, 16 * warp + lane / 8 % 2 * 8);
  }
};

template <typename T, int kDim>
__device__ __forceinline__ void make_plain_upper(GradientShared<kDim>& s, const TokenFactors& f,
                                                 const BlockRows<T>& rows,
                                                 const float (&pair)[32]) {
  const int warp = rows.warp, lane = rows.lane, r = lane / 4, c = lane % 4 * 2;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    uint32_t plain[4] = {}, scaled[4] = {};  // zero where t < i
    if (block >= warp) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 query = float_pair(f.query, rows.column(block, j));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = 8 * block + 4 * j + 2 * h;
          float x = pair[at], y = pair[at + 1];
          if (block == warp) {
            if (j == h) {
              if (c < r) x = 0.f;
              if (c + 1 < r) y = 0.f;
            } else if (j < h) {
              x = y = 0.f;
            }
          }
          scaled[2 * j + h] = pack<T>(x * query.x, y * query.y);
          plain[2 * j + h] = pack<T>(x, y);
        }
      }
    }
    stmatrix_x4((shared_address(s.pairs[1]) + rows.direct()) ^ block << 5, scaled);
    stmatrix_x4_transposed(shared_address(s.pairs[0]) + rows.turned() + 2048 * block, plain);
  }
}

template <typename T, int kDim>
__device__ __forceinline__ void make_gated_upper(GradientShared<kDim>& s, const TokenFactors& f,
                                                 const BlockRows<T>& rows,
                                                 const float (&pair)[32]) {
  const int warp = rows.warp;
  const GateFactors gates(f.block_gate);
  const float tail[2] = {f.column_tail[rows.row(0)], f.column_tail[rows.row(1)]};
  const uint32_t direct = shared_address(s.pairs[1]) + rows.direct();
  const uint32_t turned = shared_address(s.pairs[0]) + rows.turned();
  float own_pair[8];
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    uint32_t x[4] = {};  // zeros where t < i
    if (block == 0 || block == warp) {
#pragma unroll
      for (int n = 0; n < 8; ++n) own_pair[n] = pair[8 * block + n];
    }
    if (block == warp) continue;
    if (block > warp) {
      const float between = gates.between(warp, block);
      const float by[2] = {tail[0] * between, tail[1] * between};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 far = float_pair(f.query_head, rows.column(block, j));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = 8 * block + 4 * j + 2 * h;
          x[2 * j + h] = pack<T>(pair[at] * far.x * by[h], pair[at + 1] * far.y * by[h]);
        }
      }
    }
    stmatrix_x4(direct ^ block << 5, x);
    stmatrix_x4_transposed(turned + 2048 * block, x);
  }
  const float own[2] = {f.gate[rows.row(0)], f.gate[rows.row(1)]};
  const float by[2] = {f.column[rows.row(0)], f.column[rows.row(1)]};
  float2 far[2], gate[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    far[j] = float_pair(f.query, rows.column(warp, j));
    gate[j] = float_pair(f.gate, rows.column(warp, j));
  }
  uint32_t x[4];
  rows.template visit_diagonal<true>(
      own_pair, far, gate, own,
      [&](int at, int h, float u, float v) { x[at / 2] = pack<T>(u * by[h], v * by[h]); });
  stmatrix_x4(direct ^ warp << 5, x);
  stmatrix_x4_transposed(turned + 2048 * warp, x);
}

// From pair = U dO^T: s.pairs[1] = (scale D o dP)^T, and s.pairs[0] = scale D o dP with the same
// rounding, or without decay dP.
template <typename T, bool kDecay, int kDim>
__device__ __forceinline__ void make_upper(GradientShared<kDim>& s, const TokenFactors& f,
                                           const float (&pair)[32], int warp, int lane) {
  const BlockRows<T> rows{warp, lane};
  if constexpr (kDecay) {
    make_gated_upper(s, f, rows, pair);
  } else {
    make_plain_upper(s, f, rows, pair);
  }
}

// From dR U^T and K K^T: s.pairs[2] = B + B^T, its diagonal zero, and the row sums of D o dL o
// KK^T. The products and 64 / kTiles columns of it by each of the chain's warpgroups.
template <typename T, bool kDecay, int kDim>
__device__ __forceinline__ void make_lower(GradientShared<kDim>& s, const TokenFactors& f,
                                           const Tile* k, int kept) {
  constexpr int kTiles = kDim / 64, kColumns = kC / kTiles, kBlocks = kColumns / 16;
  float pair[kColumns / 2], gram[kColumns / 2];
  // Made anew: what would be kept through the chain's loop would be spilled there.
  const int thread = read_thread();
  const int group = agreed(thread / kWarpgroup);
  const int warp = thread / 32 % 4, lane = thread % 32;
  int none = 0;
  hide(none);
  none = agreed(none);
  const int from_row = group * kColumns * 128 / 16;
  fence_products();
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
    product_shared<T>(pair, describe_rows(s.grad_r[kept][i / 4]) + (none + i % 4 * 2),
                      describe_rows(s.u[kept][i / 4]) + (from_row + i % 4 * 2), i > 0);
  }
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
    product_shared<T>(gram, describe_rows(k[i / 4]) + i % 4 * 2,
                      describe_rows(k[i / 4]) + (from_row + i % 4 * 2), i > 0);
  }
  commit_products();
  BlockRows<T> rows{warp, lane};
  const int first = group * kBlocks;
  const uint32_t direct = shared_address(s.pairs[2]) + rows.direct();
  const uint32_t turned = shared_address(s.pairs[2]) + rows.turned();
  const float symmetric[2] = {f.symmetric[rows.row(0)], f.symmetric[rows.row(1)]};
  wait_products<0>();
  pin(pair);
  pin(gram);
  float own_pair[8], own_gram[8];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int block = first + b;
    if (b == 0 || block == warp) {
#pragma unroll
      for (int n = 0; n < 8; ++n) own_pair[n] = pair[8 * b + n], own_gram[n] = gram[8 * b + n];
    }
    if (block >= warp) continue;
    if constexpr (!kDecay) {
      uint32_t x[4];
      rows.make_plain(x, &pair[8 * b], &gram[8 * b], symmetric);
      stmatrix_x4(direct ^ block << 5, x);
      stmatrix_x4_transposed(turned + 2048 * block, x);
      continue;
    }
    const float between = GateFactors(f.block_gate).between(block, warp);
    const float from[2] = {f.head[rows.row(0)] * between, f.head[rows.row(1)] * between};
    const float by[2] = {symmetric[0] * from[0], symmetric[1] * from[1]};
    const float2 far[2] = {float_pair(f.column_tail, rows.column(block, 0)),
                           float_pair(f.column_tail, rows.column(block, 1))};
    uint32_t x[4];
    float columns[4];
    rows.make(x, columns, &pair[8 * b], &gram[8 * b], far, by, from);
    rows.keep_columns(s.sums.columns[warp], block, columns);
    stmatrix_x4(direct ^ block << 5, x);
    stmatrix_x4_transposed(turned + 2048 * block, x);
  }
  if (warp / kBlocks == group) {
    uint32_t x[4];
    if constexpr (kDecay) {
      const float own[2] = {f.gate[rows.row(0)], f.gate[rows.row(1)]};
      float2 far[2], gate[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        far[j] = float_pair(f.column, rows.column(warp, j));
        gate[j] = float_pair(f.gate, rows.column(warp, j));
      }
      float columns[4] = {};
      rows.template visit_diagonal<false>(
          own_pair, far, gate, own, [&](int at, int h, float u, float v) {
            const int j = at / 4;
            const float p = u * own_gram[at], q = v * own_gram[at + 1];
            rows.sums[h] += p;
            rows.sums[h] += q;
            columns[2 * j] += symmetric[h] * p;
            columns[2 * j + 1] += symmetric[h] * q;
            x[at / 2] = pack<T>(u * symmetric[h], v * symmetric[h]);
          });
      rows.keep_columns(s.sums.columns[warp], warp, columns);
    } else {
      const int r = lane / 4, c = lane % 4 * 2;
      if (c >= r) own_pair[0] = own_pair[6] = 0.f;
      if (c + 1 >= r) own_pair[1] = own_pair[7] = 0.f;
      own_pair[4] = own_pair[5] = 0.f;
      rows.make_plain(x, own_pair, own_gram, symmetric);
    }
    // Both in one block: where one has elements the other has zeros.
    const uint32_t both[4] = {add_pairs<T>(x[0], transpose(x[0])), x[1], transpose(x[1]),
                              add_pairs<T>(x[3], transpose(x[3]))};
    stmatrix_x4(direct ^ warp << 5, both);
  }
  const float x0 = sum_quad(rows.sums[0]), x1 = sum_quad(rows.sums[1]);
  if (lane % 4 == 0 && warp >= first) {
    float(&to)[kC] = lower_rows(s.sums, group);
    to[rows.row(0)] = f.row[rows.row(0)] * x0, to[rows.row(1)] = f.row[rows.row(1)] * x1;
  }
  fence_async_proxy();
}

}  // namespace efla::cuda::sm90
