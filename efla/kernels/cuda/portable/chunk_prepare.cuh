// The part of a chunk that needs no state, one block per (chunk, value head), one warp per 16 rows:
//
//   L_hat_ti = e_hat_t D_ti (k_hat_t . k_hat_i), i < t        A_hat = (I + L_hat)^-1
//   P_hat_ti = scale D_ti (q_t . k_hat_i), i <= t
//
// and the scalars of ScalarRow. D_ti = exp(G_t - G_i) is formed from the difference. With
// normalised keys every entry of A_hat is at most 1 in size, whatever the key norms.
#pragma once

#include "efla/kernels/cuda/portable/chunk_scalars.cuh"

namespace efla::cuda {

template <typename T, int kK, int kC>
struct PrepareShared {
  struct Tiles {
    T k[kC * (kK + kTilePad)];
    T q[kC * (kK + kTilePad)];
  };
  struct Triangles {
    // Blocks of 16 above the diagonal are not made.
    float lower[kC][kC + 1];    // L_hat; its upper right blocks serve as scratch of the inverse
    float inverse[kC][kC + 1];  // A_hat
  };
  union {  // the triangles take the tiles' place once the products are made
    Tiles tiles;
    Triangles triangles;
  };
  TokenScalars<kC, Gate<T>> scalars;
  uint32_t most[kC / 16];  // the largest element of A_hat, by warp
};

// out = sign * a b for 16 x 16 tiles of row-major float matrices, depth a multiple of 16; one warp.
__device__ __forceinline__ void multiply_tile(const float* a, const float* b, int pitch, int depth,
                                              float sign, float* out) {
  const int lane = threadIdx.x % 32;
  float c[2][4] = {};
  for (int k0 = 0; k0 < depth; k0 += 16) {
    const auto left = load_a(a, pitch, 0, k0);
    BFragment<float> right[2];
    load_b(right, b, pitch, k0, 0);
    mma<float>(c[0], left, right[0]);
    mma<float>(c[1], left, right[1]);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      out[(lane / 4 + j / 2 * 8) * pitch + n * 8 + lane % 4 * 2 + j % 2] = sign * c[n][j];
    }
  }
}

// Makes inverses of blocks of 2 * half from those of half: [A11 0; -A22 L21 A11 A22].
template <int kC>
__device__ __forceinline__ void merge_blocks(float (&lower)[kC][kC + 1],
                                             float (&inverse)[kC][kC + 1], const int half) {
  constexpr int kPitch = kC + 1;
  const int side = half / 16, tiles = kC / (2 * half) * side * side;
  const auto place = [&](int i, int& base, int& r, int& c) {
    base = i / (side * side) * 2 * half;
    r = i / side % side * 16;
    c = i % side * 16;
  };
  int base, r, c;
  for (int i = threadIdx.x / 32; i < tiles; i += kC / 16) {
    place(i, base, r, c);
    multiply_tile(&lower[base + half + r][base + c], &inverse[base + c][base + c], kPitch, half - c,
                  1.f, &lower[base + r][base + half + c]);  // L21 A11
  }
  __syncthreads();
  for (int i = threadIdx.x / 32; i < tiles; i += kC / 16) {
    place(i, base, r, c);
    multiply_tile(&inverse[base + half + r][base + half], &lower[base][base + half + c], kPitch,
                  r + 16, -1.f, &inverse[base + half + r][base + c]);
  }
  __syncthreads();
}

// Inverts the unit lower triangle I + lower: diagonal blocks of 16 by substitution, one thread per
// column, then pairs of blocks, 16 x 16 tiles of which go to the warps.
template <int kC>
__device__ void invert(float (&lower)[kC][kC + 1], float (&inverse)[kC][kC + 1]) {
  if (threadIdx.x < kC) {
    const int base = threadIdx.x / 16 * 16, column = threadIdx.x % 16;
    float x[16];
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      x[r] = r == column ? 1.f : 0.f;
#pragma unroll
      for (int i = 0; i < r; ++i) x[r] -= lower[base + r][base + i] * x[i];
      inverse[base + r][base + column] = x[r];
    }
  }
  __syncthreads();
#pragma unroll
  for (int half = 16; half < kC; half *= 2) merge_blocks<kC>(lower, inverse, half);
}

// The rows of ScalarRow, from the tokens' scalars. Called by the whole block.
template <typename T, int kC, typename G>
__device__ void write_scalar_rows(const TokenScalars<kC, G>& s, float* rows) {
  const int t = threadIdx.x;
  const bool long_row = t < kC && (s.key_unit[t] != 1.f || s.query_unit[t] != 1.f);
  const bool any_long = !std::is_same_v<T, __half> && __syncthreads_or(long_row);
  if (t >= kC) return;
  const float gamma = exp_gate(s.cumulative[t]);
  rows[kEraseIn * kC + t] = s.erase[t] * s.norm[t] * s.key_scale[t] * gamma;
  rows[kWrite * kC + t] = s.write[t] * s.norm[t];
  const Range range = range_of<Square<T>>(s.query_norm[t]);
  rows[kQueryGate * kC + t] = s.query[t] * range.up * gamma;
  rows[kQueryOut * kC + t] = range.down;
  rows[kKeyOut * kC + t] = exp_gate(s.total - s.cumulative[t]) * s.inverse_norm[t];
  rows[kKeyUnit * kC + t] = s.key_unit[t];
  rows[kQueryUnit * kC + t] = s.query_unit[t];
  if (t == 0) {
    rows[kChunkGate * kC] = exp_gate(s.total);
    rows[kChunkGate * kC + 2] = any_long ? 1.f : 0.f;
  }
}

// A thread's pairs of neighbouring elements of a lower triangle [kC, kC], its blocks of 16 one by
// one, in order: `visit(number, row, column)`.
template <int kC, typename Visit>
__device__ __forceinline__ void visit_pairs(Visit visit) {
  int number = 0;
#pragma unroll
  for (int r0 = 0; r0 < kC; r0 += 16) {
#pragma unroll
    for (int c0 = 0; c0 <= r0; c0 += 16) {
#pragma unroll
      for (int i = 0; i < 256; i += 4 * kC) {  // by all 2 kC threads
        const int at = i + 2 * threadIdx.x;
        visit(number++, r0 + at / 16, c0 + at % 16);
      }
    }
  }
}
template <int kC>
inline constexpr int kTrianglePairs = (kC / 16) * (kC / 16 + 1) / 2 * (64 / kC);

// A_hat is stored as it is unless it leaves half's range, as it does where a rule's steps expand
// the state. Called by the whole block with its pairs of elements.
template <typename T, int kK, int kC>
__device__ Range inverse_range(PrepareShared<T, kK, kC>& s, const float2 (&x)[kTrianglePairs<kC>]) {
  if constexpr (sizeof(T) == 4) return {};
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < kTrianglePairs<kC>; ++i) {
    most = fmaxf(most, fmaxf(fabsf(x[i].x), fabsf(x[i].y)));
  }
  const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
  if (threadIdx.x % 32 == 0) s.most[threadIdx.x / 32] = bits;
  __syncthreads();
  uint32_t largest = 0;
  for (uint32_t part : s.most) largest = max(largest, part);
  return range_of_bits(largest, 0);
}

template <typename T, int kK, int kC>
__global__ void __launch_bounds__(kC * 2, kC == 64 && kK <= 128 ? 5 : 1)
    chunk_prepare_kernel(const ChunkArgs a) {
  constexpr int kPitch = kK + kTilePad;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto& s = *reinterpret_cast<PrepareShared<T, kK, kC>*>(shared_bytes);

  const int64_t slot = blockIdx.x / a.value_heads;
  const int hv = blockIdx.x % a.value_heads, hk = hv / (a.value_heads / a.heads);
  const Chunk chunk = locate(a, slot, kC);
  if (chunk.sequence < 0) return;

  load_tile_by<2 * kC, kC, kK>(s.tiles.k, kPitch, element<T>(a.k, chunk.row, chunk.begin, hk),
                               a.k.token, chunk.tokens, a.key_dim, a.vector_k);
  load_tile_by<2 * kC, kC, kK>(s.tiles.q, kPitch, element<T>(a.q, chunk.row, chunk.begin, hk),
                               a.q.token, chunk.tokens, a.key_dim, a.vector_q);
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  const int64_t place = slot * a.value_heads + hv;
  const TokenScalars<kC, Gate<T>>& x = s.scalars;
  measure_rows<T, kK, kC>(a, s.tiles.k, s.tiles.q, s.scalars);
  // By those warps that have the least of the products to make.
  if (threadIdx.x < kC) {
    make_scalars<T, kC>(a, chunk, hv, s.scalars);
  } else {
    pass_scalars<kC>(a);
  }

  const int lane = threadIdx.x % 32, m0 = threadIdx.x / 32 * 16;
  float kk[kC / 8][4] = {}, qk[kC / 8][4] = {};
#pragma unroll
  for (int k0 = 0; k0 < kK; k0 += 16) {
    if (k0 == used_keys<kK>(a)) break;
    const auto ak = load_a(s.tiles.k, kPitch, m0, k0);
    const auto aq = load_a(s.tiles.q, kPitch, m0, k0);
    BFragment<T> b[kC / 16][2];
#pragma unroll
    for (int n = 0; n < kC / 16; ++n) {  // those above the diagonal are not used
      if (n * 16 <= m0) load_b_transposed(b[n], s.tiles.k, kPitch, k0, n * 16);
    }
#pragma unroll
    for (int n = 0; n < kC / 16; ++n) {
      if (n * 16 > m0) continue;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        mma<T>(kk[2 * n + j], ak, b[n][j]);
        mma<T>(qk[2 * n + j], aq, b[n][j]);
      }
    }
  }

  __syncthreads();
  write_scalar_rows<T>(x, a.scalars + place * kScalarRows * kC);
  auto& triangles = s.triangles;
  using S = Square<T>;
  S* scores = static_cast<S*>(a.scores) + place * kC * kC;
  const bool has_decay = a.log_decay.data != nullptr;
  float query[2], erase[2];  // of the thread's rows
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = m0 + lane / 4 + 8 * half;
    query[half] = x.query[t] * range_of<S>(x.query_norm[t]).up;
    erase[half] = x.erase[t] * x.norm[t] * x.key_scale[t];
  }
#pragma unroll
  for (int n = 0; n < kC / 8; ++n) {
    if (n / 2 * 16 > m0) continue;
    const int i = n * 8 + lane % 4 * 2;
    const float2 norms = load_two(x.inverse_norm + i);
    float gate[4] = {1.f, 1.f, 1.f, 1.f};
    if (has_decay) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        gate[j] = exp_gate(x.cumulative[m0 + lane / 4 + j / 2 * 8] - x.cumulative[i + j % 2]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int t = m0 + lane / 4 + 8 * half;
      float p[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float key = i + j <= t ? gate[2 * half + j] * (j ? norms.y : norms.x) : 0.f;
        p[j] = query[half] * qk[n][2 * half + j] * key;
        triangles.lower[t][i + j] = i + j < t ? erase[half] * kk[n][2 * half + j] * key : 0.f;
      }
      store_pair(scores + t * kC + i, p[0], p[1]);
    }
  }
  __syncthreads();
  invert<kC>(triangles.lower, triangles.inverse);
  float2 pairs[kTrianglePairs<kC>];
  visit_pairs<kC>([&](int number, int r, int c) {
    pairs[number] = make_float2(triangles.inverse[r][c], triangles.inverse[r][c + 1]);
  });
  const Range range = inverse_range(s, pairs);
  if (threadIdx.x == 0) a.scalars[(place * kScalarRows + kChunkGate) * kC + 1] = range.down;
  S* inverse = static_cast<S*>(a.inverse) + place * kC * kC;
  visit_pairs<kC>([&](int number, int r, int c) {
    store_pair(inverse + r * kC + c, range.up * pairs[number].x, range.up * pairs[number].y);
  });
}

}  // namespace efla::cuda
