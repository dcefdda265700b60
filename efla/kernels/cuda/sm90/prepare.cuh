// The auxiliary warpgroup of the scan: what a chunk needs beside the state, one or two chunks
// ahead of the warpgroups that hold it.
//
//   L_hat_ti = e_hat_t D_ti (k_hat_t . k_hat_i), i < t        A_hat = (I + L_hat)^-1
//   P_hat_ti = scale D_ti (q_t . k_hat_i), i <= t
//
// as in the portable chunk_prepare.cuh (same notation), from tiles that are in shared memory
// already, results to swizzled tiles there.
#pragma once

#include "efla/kernels/cuda/sm90/chunk.cuh"

namespace efla::cuda::sm90 {

inline constexpr int kPrepareBarrier = 1;  // named barrier of this warpgroup
inline constexpr int kPitch = kC + 4;      // of the float triangle: rows fall on different banks

// Of the triangles only the ten 16 x 16 blocks on and below the diagonal are made. Their floats are
// kept rounded to TF32, as the products take them.
struct PrepareScratch {
  float lower[kC][kPitch];    // K K^T, then L_hat; above the diagonal, products on the way
  float inverse[kC][kPitch];  // A_hat
  float row_scale[kC];        // of row t of L_hat: e_hat_t k_hat_t / k_t
  float query_scale[kC];      // of row t of P_hat
  float column_scale[kC];     // k_hat / k
  float half_gate[kC];        // log gates summed over tokens 0.., and 32.. apart
  float cumulative[kC];       // G, inclusive
  float norm[kC];             // |k|^2 as the tensor cores see it
};

__device__ __forceinline__ void sync_prepare() { sync_threads(kPrepareBarrier, kWarpgroup); }

// Block b of the ten, in the order (0, 0), (1, 0), (1, 1), (2, 0), ...: its block row and column.
__device__ __forceinline__ void block_place(int b, int& row, int& column) {
  row = b >= 6 ? 3 : b >= 3 ? 2 : b >= 1 ? 1 : 0;
  column = b - row * (row + 1) / 2;
}

__device__ __forceinline__ float round_tf32(float x) { return __uint_as_float(to_tf32(x)); }

// A 16 x 16 tile of sign * A B at out, depth a multiple of 8, TF32; one warp.
__device__ __forceinline__ void multiply_tile(const float* a, const float* b, int depth, float sign,
                                              float* out, int lane) {
  const int g = lane / 4, t = lane % 4;
  float c[2][4] = {};
#pragma unroll 4
  for (int k0 = 0; k0 < depth; k0 += 8) {
    const uint32_t x[4] = {__float_as_uint(a[g * kPitch + k0 + t]),
                           __float_as_uint(a[(g + 8) * kPitch + k0 + t]),
                           __float_as_uint(a[g * kPitch + k0 + t + 4]),
                           __float_as_uint(a[(g + 8) * kPitch + k0 + t + 4])};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t y[2] = {__float_as_uint(b[(k0 + t) * kPitch + 8 * n + g]),
                             __float_as_uint(b[(k0 + t + 4) * kPitch + 8 * n + g])};
      mma_tf32(c[n], x, y);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      *reinterpret_cast<float2*>(&out[(g + 8 * h) * kPitch + 8 * n + 2 * t]) =
          make_float2(round_tf32(sign * c[n][2 * h]), round_tf32(sign * c[n][2 * h + 1]));
    }
  }
}

// Inverts I + lower into `inverse`: the diagonal blocks of 16 by substitution in float, one per
// warp and one column per lane, then [A11 0; -A22 L21 A11 A22] for blocks of 16 and of 32.
__device__ __forceinline__ void invert(PrepareScratch& s, int thread) {
  const int warp = thread / 32, lane = thread % 32;
  const int base = 16 * warp, column = lane % 16;
  float x[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    float even = r == column ? 1.f : 0.f, odd = 0.f;
#pragma unroll
    for (int i = 0; i < r; i += 4) {
      const float4 l = *reinterpret_cast<const float4*>(&s.lower[base + r][base + i]);
      even -= l.x * x[i];
      if (i + 1 < r) odd -= l.y * x[i + 1];
      if (i + 2 < r) even -= l.z * x[i + 2];
      if (i + 3 < r) odd -= l.w * x[i + 3];
    }
    x[r] = even + odd;
  }
  if (lane < 16) {
#pragma unroll
    for (int r = 0; r < 16; ++r) s.inverse[base + r][base + column] = round_tf32(x[r]);
  }
  sync_prepare();
  if (warp % 2 == 1) {  // the block below the diagonal of this warp's pair
    float* scratch = &s.lower[base - 16][base];
    multiply_tile(&s.lower[base][base - 16], &s.inverse[base - 16][base - 16], 16, 1.f, scratch,
                  lane);
    __syncwarp();
    multiply_tile(&s.inverse[base][base], scratch, 16, -1.f, &s.inverse[base][base - 16], lane);
  }
  sync_prepare();
  const int r = warp / 2 * 16, c = warp % 2 * 16;
  // Column tile c of the lower triangle A11 begins at row c; row tile r of A22 ends at r + 16.
  multiply_tile(&s.lower[32 + r][c], &s.inverse[c][c], 32 - c, 1.f, &s.lower[r][32 + c], lane);
  sync_prepare();
  multiply_tile(&s.inverse[32 + r][32], &s.lower[0][32 + c], r + 16, -1.f, &s.inverse[32 + r][c],
                lane);
  sync_prepare();
}

// Writes a pair of neighbouring elements into a swizzled tile.
template <typename T>
__device__ __forceinline__ void put_pair(unsigned char* tile, int row, int column, float x,
                                         float y) {
  *reinterpret_cast<uint32_t*>(tile + tile_offset(row, column)) = pack<T>(x, y);
}

// Zeroes row `row` of the tiles of one operand, 64 columns each.
__device__ __forceinline__ void zero_row(unsigned char* tiles, int count, int row) {
#pragma unroll 1
  for (int i = 0; i < count * 8; ++i) {
    *reinterpret_cast<uint4*>(tiles + i / 8 * (kC * 128) + row * 128 + i % 8 * 16) =
        make_uint4(0, 0, 0, 0);
  }
}

// sum of the squares of row `row` of the tiles.
template <typename T>
__device__ __forceinline__ float square_of_row(const unsigned char* tiles, int count, int row) {
  float sum = 0.f;
#pragma unroll 2
  for (int i = 0; i < count * 8; ++i) {
    const uint4 piece = *reinterpret_cast<const uint4*>(tiles + i / 8 * (kC * 128) + row * 128 +
                                                        ((i % 8) ^ (row % 8)) * 16);
    const T* x = reinterpret_cast<const T*>(&piece);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += static_cast<float>(x[j]) * static_cast<float>(x[j]);
  }
  return sum;
}

// What a token brings from global memory; read ahead of the chunk's tiles.
struct TokenInput {
  float beta = 0.f, log_decay = 0.f;
};

__device__ __forceinline__ TokenInput read_token(const ChunkArgs& a, int row, int token, int hv,
                                                 bool exists) {
  TokenInput x;
  if (exists) {
    x.beta = *element<float>(a.beta, row, token, hv);
    if (a.log_decay.data) x.log_decay = *element<float>(a.log_decay, row, token, hv);
  }
  return x;
}

// The scalars of token t = thread index, from |k|^2 in s.norm; threads t < kC only. Needs
// sync_prepare() before its results are used; the gates still lack their sum (accumulate_gates).
__device__ __forceinline__ StepCoefficients<float> make_coefficients(const ChunkArgs& a,
                                                                     const TokenInput& x, float kk,
                                                                     bool exists, float& norm,
                                                                     float& key_scale) {
  const float lambda = a.qk_l2norm ? kk / (kk + 1e-6f) : kk;
  key_scale = a.qk_l2norm ? rsqrtf(kk + 1e-6f) : 1.f;
  norm = kk > 0.f ? sqrtf(lambda) : 1.f;
  if (!exists) return {0.f, 0.f, 0.f};
  return step_coefficients(a.rule, x.beta, lambda, a.log_decay.data != nullptr, x.log_decay);
}

// Starts d = X K^T for tiles x and k of the chunk.
template <typename T, int kK>
__device__ __forceinline__ void multiply_keys(float (&d)[32], const unsigned char* x,
                                              const unsigned char* k) {
  fence_products();
#pragma unroll
  for (int i = 0; i < kK / 16; ++i) {
    const int offset = i / 4 * (kC * 128 / 16) + i % 4 * 2;
    product_shared<T>(d, describe_rows(x) + offset, describe_rows(k) + offset, i > 0);
  }
  commit_products();
}

// Stores the blocks of K K^T that count, and |k_t|^2, which stands on the diagonal.
__device__ __forceinline__ void store_products(PrepareScratch& s, const float (&kk)[32],
                                               int thread) {
  const int warp = thread / 32, lane = thread % 32;
  const int row = 16 * warp + lane / 4, t4 = lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j > 2 * warp + 1) break;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float x = kk[4 * j + 2 * h], y = kk[4 * j + 2 * h + 1];
      *reinterpret_cast<float2*>(&s.lower[row + 8 * h][8 * j + t4]) = make_float2(x, y);
      if (j == 2 * warp + h) {
        if (t4 == lane / 4) s.norm[row + 8 * h] = x;
        if (t4 + 1 == lane / 4) s.norm[row + 8 * h] = y;
      }
    }
  }
}

// Scales K K^T to L_hat: D_ti times a factor of the row and one of the column.
__device__ __forceinline__ void scale_products(PrepareScratch& s, bool has_decay, int thread) {
#pragma unroll
  for (int i = 0; i < 5; ++i) {  // 640 groups of four
    int block_row, block_column;
    block_place(2 * i + thread / 64, block_row, block_column);
    const int r = 16 * block_row + thread % 16, c = 16 * block_column + thread / 16 % 4 * 4;
    float4& l = *reinterpret_cast<float4*>(&s.lower[r][c]);
    const float4 column = *reinterpret_cast<const float4*>(&s.column_scale[c]);
    const float row = s.row_scale[r];
    float x[4] = {l.x * column.x, l.y * column.y, l.z * column.z, l.w * column.w};
    if (has_decay) {
      const float4 gate = *reinterpret_cast<const float4*>(&s.cumulative[c]);
      const float sum = s.cumulative[r];
      x[0] *= __expf(sum - gate.x), x[1] *= __expf(sum - gate.y);
      x[2] *= __expf(sum - gate.z), x[3] *= __expf(sum - gate.w);
    }
    l = make_float4(round_tf32(row * x[0]), round_tf32(row * x[1]), round_tf32(row * x[2]),
                    round_tf32(row * x[3]));
  }
}

// P_hat from Q K^T.
template <typename T>
__device__ __forceinline__ void store_scores(const PrepareScratch& s, const float (&qk)[32],
                                             unsigned char* scores, bool has_decay, int thread) {
  const int warp = thread / 32, lane = thread % 32;
  const int row = 16 * warp + lane / 4, t4 = lane % 4 * 2;
  const float scale[2] = {s.query_scale[row], s.query_scale[row + 8]};
  const float sum[2] = {has_decay ? s.cumulative[row] : 0.f,
                        has_decay ? s.cumulative[row + 8] : 0.f};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j > 2 * warp + 1) break;
    const int c = 8 * j + t4;
    const float2 column = *reinterpret_cast<const float2*>(&s.column_scale[c]);
    float2 gate;
    if (has_decay) gate = *reinterpret_cast<const float2*>(&s.cumulative[c]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row + 8 * h;
      float x = scale[h] * qk[4 * j + 2 * h] * column.x;
      float y = scale[h] * qk[4 * j + 2 * h + 1] * column.y;
      if (has_decay) x *= __expf(sum[h] - gate.x), y *= __expf(sum[h] - gate.y);
      if (j >= 2 * warp) {
        if (c > r) x = 0.f;
        if (c + 1 > r) y = 0.f;
      }
      put_pair<T>(scores, r, c, x, y);
    }
  }
}

// Rounds A_hat into its tile.
template <typename T>
__device__ __forceinline__ void store_inverse(const PrepareScratch& s, unsigned char* inverse,
                                              int thread) {
  const int warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int block = 4 * i + warp;
    if (block >= 10) break;
    int block_row, block_column;
    block_place(block, block_row, block_column);
    const int r = 16 * block_row + lane % 16, c = 16 * block_column + lane / 16 * 8;
    const float4 x = *reinterpret_cast<const float4*>(&s.inverse[r][c]);
    const float4 y = *reinterpret_cast<const float4*>(&s.inverse[r][c + 4]);
    *reinterpret_cast<uint4*>(inverse + tile_offset(r, c)) =
        make_uint4(pack<T>(x.x, x.y), pack<T>(x.z, x.w), pack<T>(y.x, y.y), pack<T>(y.z, y.w));
  }
}

// The scalars of one chunk; |k|^2 is in s.norm. Threads t < kC take a token's coefficients, the
// others the queries' scales.
template <typename T, int kK, bool kScores>
__device__ __forceinline__ void make_scalars(const ChunkArgs& a, PrepareScratch& s,
                                             const unsigned char* q, ChunkScalars& scalars,
                                             const TokenInput& input, int tokens, int thread) {
  const bool has_decay = a.log_decay.data != nullptr;
  if (thread < kC) {
    float norm, key_scale;
    const float square = s.norm[thread];
    const auto c = make_coefficients(a, input, square, thread < tokens, norm, key_scale);
    if (has_decay) {  // inclusive sums, each warp over its own 32 tokens
      float sum = c.log_gate;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, sum, offset);
        if (thread % 32 >= offset) sum += other;
      }
      s.half_gate[thread] = sum;
    }
    s.row_scale[thread] = c.erase * norm * key_scale;
    s.column_scale[thread] = square > 0.f ? rsqrtf(square) : key_scale;
    scalars.write[thread] = c.write * norm;
  } else if constexpr (kScores) {
    float scale = a.scale;
    if (a.qk_l2norm) scale *= rsqrtf(square_of_row<T>(q, kK / 64, thread - kC) + 1e-6f);
    s.query_scale[thread - kC] = scale;
  }
  sync_prepare();
  if (thread < kC) {
    float gamma = 1.f, rest = 1.f, whole = 1.f;
    if (has_decay) {
      const float half = s.half_gate[31], total = half + s.half_gate[63];
      const float sum = s.half_gate[thread] + (thread >= 32 ? half : 0.f);
      s.cumulative[thread] = sum;
      gamma = expf(sum), rest = expf(total - sum), whole = expf(total);
    }
    scalars.erase[thread] = s.row_scale[thread] * gamma;
    if constexpr (kScores) scalars.query[thread] = s.query_scale[thread] * gamma;
    scalars.key_out[thread] = s.column_scale[thread] * rest;
    if (thread == 0) scalars.gate = whole;
  }
  if (has_decay) sync_prepare();  // for s.cumulative
}

// The chunk's part before the inverse: from kk = K K^T to L_hat in the scratch, P_hat and scalars.
template <typename T, int kK, bool kErase, bool kScores>
__device__ __forceinline__ void prepare_chunk(const ChunkArgs& a, PrepareScratch& s,
                                              float (&kk)[32], unsigned char* k,
                                              const unsigned char* q, unsigned char* scores,
                                              ChunkScalars& scalars, const TokenInput& input,
                                              int tokens, int thread) {
  const bool has_decay = a.log_decay.data != nullptr;
  while (true) {
    store_products(s, kk, thread);
    sync_prepare();
    // A key whose |k|^2 overflows is skipped: as zero, after which the products are good.
    const float square = s.norm[thread % kC];
    const bool bad =
        thread < tokens && square > FLT_MAX && (a.qk_l2norm || key_overflows(a.rule, square));
    if (bad) {
      zero_row(k, kK / 64, thread);
      fence_async_proxy();
    }
    if (!sync_threads_or(kPrepareBarrier, kWarpgroup, bad)) break;
    multiply_keys<T, kK>(kk, k, k);
    wait_products<0>();
    pin(kk);
  }
  float qk[32];
  if constexpr (kScores) multiply_keys<T, kK>(qk, q, k);  // while the coefficients are made
  make_scalars<T, kK, kScores>(a, s, q, scalars, input, tokens, thread);
  if constexpr (kErase) scale_products(s, has_decay, thread);
  if constexpr (kScores) {
    wait_products<0>();
    pin(qk);
    store_scores<T>(s, qk, scores, has_decay, thread);
  }
}

}  // namespace efla::cuda::sm90
