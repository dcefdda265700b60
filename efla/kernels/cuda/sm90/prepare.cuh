// The auxiliary warpgroup of the scan: what a chunk needs beside the state, one or two chunks
// ahead of the warpgroups that hold it.
//
//   L_hat_ti = e_hat_t D_ti (k_hat_t . k_hat_i), i < t        A_hat = (I + L_hat)^-1
//   P_hat_ti = scale D_ti (q_t . k_hat_i), i <= t      (its tile holds P_hat^T)
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
  float lower[kC][kPitch];              // L_hat; above the diagonal, products on the way
  float inverse[kC][kPitch];            // A_hat
  float row_scale[kC];                  // of row t of L_hat
  float query_scale[kC];                // of row t of P_hat
  float column_scale[kC];               // k_hat / k
  float half_gate[kC];                  // log gates summed over tokens 0.., and 32.. apart
  float cumulative[kC];                 // G, inclusive
  float square[kC];                     // |k|^2 as the tensor cores see it
  float beta[2][kC], log_decay[2][kC];  // of this chunk and the next
};

__device__ __forceinline__ void sync_prepare() { sync_threads(kPrepareBarrier, kWarpgroup); }

// Block b of the ten, in the order (0, 0), (1, 0), (1, 1), (2, 0), ...: its block row and column.
__device__ __forceinline__ void block_place(int b, int& row, int& column) {
  row = b >= 6 ? 3 : b >= 3 ? 2 : b >= 1 ? 1 : 0;
  column = b - row * (row + 1) / 2;
}

__device__ __forceinline__ float round_tf32(float x) { return __uint_as_float(to_tf32(x)); }

// c = A B for a 16 x 8 kWide tile, depth a multiple of 8, TF32; one warp. Element c[n][2 h + e] is
// row g + 8 h, column 8 n + 2 t + e for lane 4 g + t.
template <int kWide>
__device__ __forceinline__ void multiply_tile(float (&c)[kWide][4], const float* a, const float* b,
                                              int depth, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < kWide; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.f;
#pragma unroll 4
  for (int k0 = 0; k0 < depth; k0 += 8) {
    const uint32_t x[4] = {__float_as_uint(a[g * kPitch + k0 + t]),
                           __float_as_uint(a[(g + 8) * kPitch + k0 + t]),
                           __float_as_uint(a[g * kPitch + k0 + t + 4]),
                           __float_as_uint(a[(g + 8) * kPitch + k0 + t + 4])};
#pragma unroll
    for (int n = 0; n < kWide; ++n) {
      const uint32_t y[2] = {__float_as_uint(b[(k0 + t) * kPitch + 8 * n + g]),
                             __float_as_uint(b[(k0 + t + 4) * kPitch + 8 * n + g])};
      mma_tf32(c[n], x, y);
    }
  }
}

// Stores sign * c at out, rounded.
template <int kWide>
__device__ __forceinline__ void store_tile(float* out, const float (&c)[kWide][4], float sign,
                                           int lane) {
#pragma unroll
  for (int n = 0; n < kWide; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      *reinterpret_cast<float2*>(&out[(lane / 4 + 8 * h) * kPitch + 8 * n + lane % 4 * 2]) =
          make_float2(round_tf32(sign * c[n][2 * h]), round_tf32(sign * c[n][2 * h + 1]));
    }
  }
}

// The same for an 8 x 8 tile of depth 8.
__device__ __forceinline__ void multiply_small(const float* a, const float* b, float sign,
                                               float* out, int lane) {
  const int g = lane / 4, t = lane % 4;
  const uint32_t x[4] = {__float_as_uint(a[g * kPitch + t]), 0,
                         __float_as_uint(a[g * kPitch + t + 4]), 0};
  const uint32_t y[2] = {__float_as_uint(b[t * kPitch + g]),
                         __float_as_uint(b[(t + 4) * kPitch + g])};
  float c[4] = {};
  mma_tf32(c, x, y);
  *reinterpret_cast<float2*>(&out[g * kPitch + 2 * t]) =
      make_float2(round_tf32(sign * c[0]), round_tf32(sign * c[1]));
}

// Rounds block `block` of the ten of A_hat into its tile; one warp.
template <typename T>
__device__ __forceinline__ void store_block(const PrepareScratch& s, unsigned char* inverse,
                                            int block_row, int block_column, int lane) {
  const int r = 16 * block_row + lane % 16, c = 16 * block_column + lane / 16 * 8;
  const float4 x = *reinterpret_cast<const float4*>(&s.inverse[r][c]);
  const float4 y = *reinterpret_cast<const float4*>(&s.inverse[r][c + 4]);
  *reinterpret_cast<uint4*>(inverse + tile_offset(r, c)) =
      make_uint4(pack<T>(x.x, x.y), pack<T>(x.z, x.w), pack<T>(y.x, y.y), pack<T>(y.z, y.w));
}

// The tile of (I + L_hat)^-1. The scratch's diagonal blocks are zero above the diagonal already.
// Blocks of 8 by substitution in float, a column per lane, then [A11 0; -A22 L21 A11 A22] for
// blocks of 8, of 16 and of 32. `meanwhile` is work that the chain of the first step leaves room
// for.
template <typename T, typename Work>
__device__ __forceinline__ void invert(PrepareScratch& s, unsigned char* inverse, int thread,
                                       Work meanwhile) {
  const int warp = thread / 32, lane = thread % 32;
  const int base = 16 * warp, first = base + lane / 8 % 2 * 8, column = lane % 8;
  float x[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    float even = r == column ? 1.f : 0.f, odd = 0.f;
#pragma unroll
    for (int i = 0; i < r; i += 4) {
      const float4 l = *reinterpret_cast<const float4*>(&s.lower[first + r][first + i]);
      even -= l.x * x[i];
      if (i + 1 < r) odd -= l.y * x[i + 1];
      if (i + 2 < r) even -= l.z * x[i + 2];
      if (i + 3 < r) odd -= l.w * x[i + 3];
    }
    x[r] = even + odd;
  }
  meanwhile();
  if (lane < 16) {
#pragma unroll
    for (int r = 0; r < 8; ++r) s.inverse[first + r][first + column] = round_tf32(x[r]);
  }
  __syncwarp();
  multiply_small(&s.lower[base + 8][base], &s.inverse[base][base], 1.f, &s.lower[base][base + 8],
                 lane);
  __syncwarp();
  multiply_small(&s.inverse[base + 8][base + 8], &s.lower[base][base + 8], -1.f,
                 &s.inverse[base + 8][base], lane);
  sync_prepare();
  {  // blocks of 16: a warp takes 8 columns of one of the two pairs
    const int pair = warp / 2 * 32, c8 = warp % 2 * 8;
    float c[1][4];
    multiply_tile(c, &s.lower[pair + 16][pair], &s.inverse[pair][pair + c8], 16, lane);
    store_tile(&s.lower[pair][pair + 16 + c8], c, 1.f, lane);
    store_block<T>(s, inverse, warp, warp, lane);
    __syncwarp();
    multiply_tile(c, &s.inverse[pair + 16][pair + 16], &s.lower[pair][pair + 16 + c8], 16, lane);
    store_tile(&s.inverse[pair + 16][pair + c8], c, -1.f, lane);
  }
  sync_prepare();
  // Blocks of 32: a warp takes one of four tiles. Column tile c of the lower triangle A11 begins at
  // row c; row tile r of A22 ends at r + 16.
  const int r = warp / 2 * 16, c = warp % 2 * 16;
  float tile[2][4];
  multiply_tile(tile, &s.lower[32 + r][c], &s.inverse[c][c], 32 - c, lane);
  store_tile(&s.lower[r][32 + c], tile, 1.f, lane);
  if (warp % 2 == 0) store_block<T>(s, inverse, warp + 1, warp, lane);
  sync_prepare();
  multiply_tile(tile, &s.inverse[32 + r][32], &s.lower[0][32 + c], r + 16, lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // 8-column group i / 2, rows g + 8 (i % 2)
    *reinterpret_cast<uint32_t*>(
        inverse + tile_offset(32 + r + lane / 4 + i % 2 * 8, c + i / 2 * 8 + lane % 4 * 2)) =
        pack<T>(-tile[i / 2][i % 2 * 2], -tile[i / 2][i % 2 * 2 + 1]);
  }
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

// What a token brings from global memory.
struct TokenInput {
  float beta, log_decay;
};

// Starts copying a float into shared memory, or a zero; commit_copies() and wait_copies() finish
// it.
__device__ __forceinline__ void copy_async_float(float* shared, const float* global, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(exists ? 4 : 0)
               : "memory");
}

// Starts reading a thread's token for the chunk of buffer `to`, ahead of the chunk's tiles.
template <bool kDecay>
__device__ __forceinline__ void read_token(const ChunkArgs& a, PrepareScratch& s, int to, int row,
                                           int token, int hv, int thread, bool exists) {
  if (thread < kC) {
    if (!exists) token = 0;  // an address that may be formed
    copy_async_float(&s.beta[to][thread], element<float>(a.beta, row, token, hv), exists);
    if constexpr (kDecay) {
      copy_async_float(&s.log_decay[to][thread], element<float>(a.log_decay, row, token, hv),
                       exists);
    }
  }
  commit_copies();
}

// A token's scalars for the normalised key: e |k|^2 / |k as stored|, w |k| and the log gate.
struct HatCoefficients {
  float log_gate, erase, write;
};

template <bool kDecay>
__device__ __forceinline__ HatCoefficients hat_coefficients(const ChunkArgs& a, const TokenInput& x,
                                                            float square) {
  const float root = square > 0.f ? rsqrtf(square) : 0.f;
  const float key_scale = a.qk_l2norm ? rsqrtf(square + 1e-6f) : 1.f;
  const float lambda = a.qk_l2norm ? square * key_scale * key_scale : square;
  if (!kDecay && __builtin_expect(a.rule == Rule::kExact && square > 0.f, 1)) {
    // e |k|^2 = w |k|^2 = 1 - e^-x without the detour over phi: the chain that matters most.
    const float erased = -expm1f(-x.beta * lambda);
    return {0.f, erased * root, a.qk_l2norm ? erased * root / key_scale : erased * root};
  }
  const auto c = step_coefficients(a.rule, x.beta, lambda, kDecay, x.log_decay);
  const float norm = square > 0.f ? square * root * key_scale : 1.f;  // |k|; 1 for a zero key
  return {c.log_gate, c.erase * norm * key_scale, c.write * norm};
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

// |k_t|^2, from the diagonal of K K^T. Returns whether one of the thread's overflows.
__device__ __forceinline__ bool store_squares(PrepareScratch& s, const float (&kk)[32],
                                              int thread) {
  const int warp = thread / 32, lane = thread % 32, g = lane / 4;
  // Element (r, r) of the two 8 x 8 blocks on the diagonal lies with lane 4 g + g / 2.
  const bool odd = g % 2 == 1;
  float x[2];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if (warp != w) continue;
#pragma unroll
    for (int h = 0; h < 2; ++h) x[h] = odd ? kk[8 * w + 6 * h + 1] : kk[8 * w + 6 * h];
  }
  if (g / 2 != lane % 4) return false;
  s.square[16 * warp + g] = x[0];
  s.square[16 * warp + 8 + g] = x[1];
  return fmaxf(x[0], x[1]) > FLT_MAX;
}

// L_hat from K K^T, row factor times column factor times D_ti. What lies above the diagonal in the
// diagonal blocks is never read.
template <bool kDecay>
__device__ __forceinline__ void store_lower(PrepareScratch& s, const float (&kk)[32], int thread) {
  const int warp = thread / 32, lane = thread % 32;
  const int row = 16 * warp + lane / 4, t4 = lane % 4 * 2;
  const float scale[2] = {s.row_scale[row], s.row_scale[row + 8]};
  const float sum[2] = {kDecay ? s.cumulative[row] : 0.f, kDecay ? s.cumulative[row + 8] : 0.f};
  // Read ahead of the writes: the compiler cannot tell that they do not overlap.
  float2 column[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    column[j] = *reinterpret_cast<const float2*>(&s.column_scale[8 * j + t4]);
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j > 2 * warp + 1) break;
    float2 gate;
    if constexpr (kDecay) gate = *reinterpret_cast<const float2*>(&s.cumulative[8 * j + t4]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = scale[h] * column[j].x * kk[4 * j + 2 * h];
      float y = scale[h] * column[j].y * kk[4 * j + 2 * h + 1];
      if constexpr (kDecay) x *= __expf(sum[h] - gate.x), y *= __expf(sum[h] - gate.y);
      *reinterpret_cast<float2*>(&s.lower[row + 8 * h][8 * j + t4]) =
          make_float2(round_tf32(x), round_tf32(y));
    }
  }
}

// P_hat transposed from kq = K Q^T: rows are keys. So the warp with the most of L_hat has the least
// of this.
template <typename T, bool kDecay>
__device__ __forceinline__ void store_scores(const PrepareScratch& s, const float (&kq)[32],
                                             unsigned char* scores, int thread) {
  const int warp = thread / 32, lane = thread % 32;
  const int row = 16 * warp + lane / 4, t4 = lane % 4 * 2;
  const float scale[2] = {s.column_scale[row], s.column_scale[row + 8]};
  const float sum[2] = {kDecay ? s.cumulative[row] : 0.f, kDecay ? s.cumulative[row + 8] : 0.f};
  const int offset = tile_offset(row, t4);
#pragma unroll
  for (int j0 = 0; j0 < 8; j0 += 4) {  // reads ahead of writes, as above
    float2 query[4], gate[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      query[j] = *reinterpret_cast<const float2*>(&s.query_scale[8 * (j0 + j) + t4]);
      if constexpr (kDecay) {
        gate[j] = *reinterpret_cast<const float2*>(&s.cumulative[8 * (j0 + j) + t4]);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int j = j0 + i / 2, h = i % 2, r = row + 8 * h, c = 8 * j + t4;
      float x = scale[h] * query[i / 2].x * kq[4 * j + 2 * h];
      float y = scale[h] * query[i / 2].y * kq[4 * j + 2 * h + 1];
      if constexpr (kDecay) {
        x *= __expf(gate[i / 2].x - sum[h]);
        y *= __expf(gate[i / 2].y - sum[h]);
      }
      const uint32_t pair = pack<T>(c < r ? 0.f : x, c + 1 < r ? 0.f : y);
      if (j >= 2 * warp) {
        *reinterpret_cast<uint32_t*>(scores + ((offset ^ (j << 4)) + h * 1024)) = pair;
      }
    }
  }
}

// The scalars of one chunk. Threads t < kC take a token's coefficients, the others the queries'
// scales.
template <typename T, int kK, bool kDecay, bool kScores>
__device__ __forceinline__ void make_scalars(const ChunkArgs& a, PrepareScratch& s,
                                             const unsigned char* q, ChunkScalars& scalars,
                                             int input, int tokens, int thread) {
  HatCoefficients c{0.f, 0.f, 0.f};
  if (thread < kC) {
    const float square = s.square[thread];
    if (thread < tokens) {
      const TokenInput token{s.beta[input][thread], kDecay ? s.log_decay[input][thread] : 0.f};
      c = hat_coefficients<kDecay>(a, token, square);
    }
    s.row_scale[thread] = c.erase;
    s.column_scale[thread] = square > 0.f  ? rsqrtf(square)
                             : a.qk_l2norm ? rsqrtf(square + 1e-6f)
                                           : 1.f;
    scalars.write[thread] = c.write;
    if constexpr (kDecay) {  // inclusive sums, each warp over its own 32 tokens
      float sum = c.log_gate;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, sum, offset);
        if (thread % 32 >= offset) sum += other;
      }
      s.half_gate[thread] = sum;
    } else {
      scalars.erase[thread] = c.erase;
      scalars.key_out[thread] = s.column_scale[thread];
      if (thread == 0) scalars.gate = 1.f;
    }
  } else if constexpr (kScores) {
    float scale = a.scale;
    if (a.qk_l2norm) scale *= rsqrtf(square_of_row<T>(q, kK / 64, thread - kC) + 1e-6f);
    s.query_scale[thread - kC] = scale;
    if constexpr (!kDecay) scalars.query[thread - kC] = scale;
  }
  sync_prepare();
  if constexpr (!kDecay) return;
  if (thread < kC) {
    const float half = s.half_gate[31], total = half + s.half_gate[63];
    const float sum = s.half_gate[thread] + (thread >= 32 ? half : 0.f);
    s.cumulative[thread] = sum;
    scalars.erase[thread] = c.erase * expf(sum);
    if constexpr (kScores) scalars.query[thread] = s.query_scale[thread] * expf(sum);
    scalars.key_out[thread] = s.column_scale[thread] * expf(total - sum);
    if (thread == 0) scalars.gate = expf(total);
  }
  sync_prepare();
}

// The chunk's part before the inverse: from kk = K K^T to the scalars and L_hat in the scratch, and
// (kScores) kq = K Q^T.
template <typename T, int kK, bool kErase, bool kDecay, bool kScores>
__device__ __forceinline__ void prepare_chunk(const ChunkArgs& a, PrepareScratch& s,
                                              float (&kk)[32], float (&kq)[32], unsigned char* k,
                                              const unsigned char* q, ChunkScalars& scalars,
                                              int input, int tokens, int thread) {
  // A key whose |k|^2 overflows is skipped by the exact rules: as zero. Then all starts again.
  while (sync_threads_or(kPrepareBarrier, kWarpgroup, store_squares(s, kk, thread)) &&
         (a.qk_l2norm || key_overflows(a.rule, HUGE_VALF))) {
    if (thread < tokens && s.square[thread] > FLT_MAX) zero_row(k, kK / 64, thread);
    fence_async_proxy();
    sync_prepare();
    multiply_keys<T, kK>(kk, k, k);
    wait_products<0>();
    pin(kk);
  }
  if constexpr (kScores) multiply_keys<T, kK>(kq, k, q);  // while the coefficients are made
  make_scalars<T, kK, kDecay, kScores>(a, s, q, scalars, input, tokens, thread);
  if constexpr (kErase) store_lower<kDecay>(s, kk, thread);
  if constexpr (kScores) {
    wait_products<0>();
    pin(kq);
  }
}

}  // namespace efla::cuda::sm90
