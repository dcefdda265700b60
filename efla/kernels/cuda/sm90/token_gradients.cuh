// The warpgroup of the backward walk that makes dQ and dK of a chunk, from what the forward walk
// kept (U, the state S before the chunk) and what the chain of state_gradient.cuh leaves (dR, the
// gradient dS of the state after it). Equations and names are those of the portable
// chunk_gradients.cuh:
//
//   dL = -strictLower(dR U^T)    dP = tril(dO U^T)    Z = dR S^T    Y = dO S^T    X = U dS^T
//   dQ = gate_q Y + scale (D o dP) K
//   dK = (B + B^T) K - e Gamma Z + scale (D o dP)^T Q + gate_k X + 2 k dlambda,   B = e (dL o D)
//
// What needs neither dR nor dS comes first: meanwhile the chain makes them.
#pragma once

#include "efla/kernels/cuda/sm90/backward_shared.cuh"

namespace efla::cuda::sm90 {

// Sums over the four lanes that share a row of an accumulator; in all of them.
__device__ __forceinline__ float sum_quad(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Transposes an 8 x 8 matrix of 16-bit elements that lies across a warp.
__device__ __forceinline__ uint32_t transpose(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

template <typename T>
__device__ __forceinline__ uint32_t add_pairs(uint32_t x, uint32_t y) {
  using Pair = std::conditional_t<kIsBfloat16<T>, __nv_bfloat162, __half2>;
  const Pair sum = __hadd2(*reinterpret_cast<const Pair*>(&x), *reinterpret_cast<const Pair*>(&y));
  return *reinterpret_cast<const uint32_t*>(&sum);
}

template <typename T, bool kDecay>
struct TokenGradients {
  using Pair = unsigned char[2][kC * 128];  // 64 rows of 128 columns, in halves
  const ChunkArgs& a;
  GradientShared& s;
  const Place& p;
  const int warp, lane;                   // of this warpgroup
  const int row0 = 16 * warp + lane / 4;  // of accumulators; and row0 + 8
  const int t4 = lane % 4 * 2;

  static __device__ __forceinline__ void sync() { sync_threads(2, kWarpgroup); }

  // d = X S^T for a tile pair x [kC, V] and a transposed state [V, K].
  __device__ __forceinline__ void multiply_state(float (&d)[64], Pair& x,
                                                 unsigned char (&state)[2][2][kC * 128]) {
    fence_products();
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      product_shared_columns<T>(d, describe_rows(x[i / 4]) + i % 4 * 2,
                                describe_columns(state[i / 4][0], kC * 128) + 128 * (i % 4), i > 0);
    }
    commit_products();
    wait_products<0>();
    pin(d);
  }

  // d += X Y for a C x C tile x and a tile pair y [kC, K].
  __device__ __forceinline__ void add_square(float (&d)[64], const unsigned char* x, Pair& y) {
#pragma unroll
    for (int i = 0; i < kC / 16; ++i) {
      product_shared_columns<T>(d, describe_rows(x) + 2 * i,
                                describe_columns(y[0], kC * 128) + 128 * i, true);
    }
  }

  // d = X Y^T for tile pairs of 128 columns.
  __device__ __forceinline__ void multiply_rows(float (&d)[32], Pair& x, Pair& y) {
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      product_shared<T>(d, describe_rows(x[i / 4]) + i % 4 * 2, describe_rows(y[i / 4]) + i % 4 * 2,
                        i > 0);
    }
  }

  // Elements 2 n, 2 n + 1 of an accumulator [64, 128] lie at row row_of(n), columns n / 2 * 8 + t4
  // and the next.
  __device__ __forceinline__ int row_of(int n) const { return row0 + n % 2 * 8; }
  __device__ __forceinline__ float2 pair_at(const Pair& tiles, int n) const {
    const int offset = row0 * 128 + ((lane / 4 ^ n / 2 % 8) << 4) + t4 * 2;
    return unpack<T>(
        *reinterpret_cast<const uint32_t*>(tiles[n / 16] + offset + n % 2 * (8 * 128)));
  }

  // sum_c d[t, c] tile[t, c] of rows row0 and row0 + 8, in all lanes of the quad.
  __device__ __forceinline__ float2 row_dots(const float (&d)[64], const Pair& tiles) const {
    float sum[2] = {};
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      const float2 x = pair_at(tiles, n);
      sum[n % 2] += d[2 * n] * x.x + d[2 * n + 1] * x.y;
    }
    return make_float2(sum_quad(sum[0]), sum_quad(sum[1]));
  }

  // For the scalars' warps.
  __device__ __forceinline__ void keep_sums(float (&sums)[kC], float x, float y) const {
    if (lane % 4 == 0) sums[row0] = x, sums[row0 + 8] = y;
  }

  __device__ __forceinline__ void scale_rows(float (&d)[64], const float (&factor)[kC]) const {
    const float x[2] = {factor[row0], factor[row0 + 8]};
#pragma unroll
    for (int n = 0; n < 32; ++n) d[2 * n] *= x[n % 2], d[2 * n + 1] *= x[n % 2];
  }

  // From pair = dR U^T (kScores: dO U^T) and gram = K K^T (Q K^T, only with decay) to the C x C
  // operands and their sums. kScores: s.pairs[0] = scale (D o dP), columns scaled for K as stored;
  // s.pairs[1] = its transpose, scaled for Q as stored. Else s.pairs[0] = B + B^T, columns scaled
  // for K as stored.
  template <bool kScores>
  __device__ __forceinline__ void make_operands(const float (&pair)[32], const float (&gram)[32],
                                                const TokenFactors& w) {
    constexpr bool kSums = kDecay || !kScores;
    // With m = D o dP / |k_i|, or -D o dL / |k_i| in the other: [t][i] is direct_t key_i m, [i][t]
    // is turned_t m, and the sums are of key_i m gram, times `row` or `turned` of t.
    float direct_factor[2], turned_factor[2], row_factor[2], sums[2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int t = row0 + 8 * h;
      if (kScores) {
        direct_factor[h] = a.scale;
        turned_factor[h] = row_factor[h] = w.query[t];
      } else {
        const float norm = -w.norm[t], key = w.key_scale[t], erase = w.erase[t];
        direct_factor[h] = erase * norm;
        row_factor[h] = norm * key;
        turned_factor[h] = erase * row_factor[h];
      }
    }
    const float gate[2] = {kDecay ? w.cumulative[row0] : 0.f,
                           kDecay ? w.cumulative[row0 + 8] : 0.f};
#pragma unroll
    for (int block = 0; block < 4; ++block) {  // this warp's rows t, columns i of 16 x 16 blocks
      uint32_t direct[4] = {}, turned[4] = {};
      if (block <= warp) {
        float columns[4] = {};
#pragma unroll
        for (int n = 0; n < 4; ++n) {  // column group 2 block + n / 2, rows row0 + 8 (n % 2)
          const int h = n % 2, t = row0 + 8 * h, i = 16 * block + n / 2 * 8 + t4;
          const float2 inverse = *reinterpret_cast<const float2*>(&w.inverse_norm[i]);
          const float2 key = *reinterpret_cast<const float2*>(&w.key_scale[i]);
          float x = pair[8 * block + 2 * n] * inverse.x;
          float y = pair[8 * block + 2 * n + 1] * inverse.y;
          if constexpr (kDecay) {
            const float2 other = *reinterpret_cast<const float2*>(&w.cumulative[i]);
            x *= __expf(gate[h] - other.x), y *= __expf(gate[h] - other.y);
          }
          if (block == warp) {
            if (kScores ? i > t : i >= t) x = 0.f;
            if (kScores ? i + 1 > t : i + 1 >= t) y = 0.f;
          }
          const float kx = x * key.x, ky = y * key.y;
          if constexpr (kSums) {
            const float gx = kx * gram[8 * block + 2 * n], gy = ky * gram[8 * block + 2 * n + 1];
            sums[h] += gx + gy;
            if constexpr (kDecay) {
              columns[n / 2 * 2] += turned_factor[h] * gx;
              columns[n / 2 * 2 + 1] += turned_factor[h] * gy;
            }
          }
          direct[n] = pack<T>(direct_factor[h] * kx, direct_factor[h] * ky);
          turned[n] = pack<T>(turned_factor[h] * x, turned_factor[h] * y);
        }
        if constexpr (kDecay) {
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            float sum = columns[n];
            sum += __shfl_xor_sync(0xffffffffu, sum, 4);
            sum += __shfl_xor_sync(0xffffffffu, sum, 8);
            sum += __shfl_xor_sync(0xffffffffu, sum, 16);
            if (lane < 4) {
              s.sums.columns[kScores][warp][16 * block + n / 2 * 8 + t4 + n % 2] = sum;
            }
          }
        }
      } else if (kDecay && lane < 16) {
        s.sums.columns[kScores][warp][16 * block + lane] = 0.f;
      }
      const int direct_at = tile_offset(16 * warp + lane % 16, 16 * block + lane / 16 * 8);
      const int turned_at =
          tile_offset(16 * block + lane / 16 * 8 + lane % 8, 16 * warp + lane / 8 % 2 * 8);
      if (kScores) {  // zero above the diagonal
        stmatrix_x4(shared_address(s.pairs[0]) + direct_at, direct);
        stmatrix_x4_transposed(shared_address(s.pairs[1]) + turned_at, turned);
      } else if (block <= warp) {
        if (block == warp) {  // both in one block: where one has elements the other has zeros
          direct[0] = add_pairs<T>(direct[0], transpose(turned[0]));
          direct[2] = transpose(turned[1]);
          direct[3] = add_pairs<T>(direct[3], transpose(turned[3]));
        } else {
          stmatrix_x4_transposed(shared_address(s.pairs[0]) + turned_at, turned);
        }
        stmatrix_x4(shared_address(s.pairs[0]) + direct_at, direct);
      }
    }
    if constexpr (kSums) {
      keep_sums(s.sums.pairs[kScores], row_factor[0] * sum_quad(sums[0]),
                row_factor[1] * sum_quad(sums[1]));
    }
    fence_async_proxy();
  }

  // Backward of x r, r = 1 / |x|: r (g - x r^2 (x.g)), in place.
  __device__ __forceinline__ void through_l2norm(float (&d)[64], const Pair& tiles,
                                                 const float (&scale)[kC], float divide) const {
    const float2 dots = row_dots(d, tiles);
    const float r[2] = {scale[row0] / divide, scale[row0 + 8] / divide};
    const float along[2] = {r[0] * r[0] * dots.x, r[1] * r[1] * dots.y};
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      const float2 x = pair_at(tiles, n);
      d[2 * n] = r[n % 2] * (d[2 * n] - along[n % 2] * x.x);
      d[2 * n + 1] = r[n % 2] * (d[2 * n + 1] - along[n % 2] * x.y);
    }
  }

  // Writes dQ or dK; as parts of grouped heads in float.
  __device__ __forceinline__ void store_rows(const MutableView& view, const float (&d)[64],
                                             int64_t begin, int tokens) const {
    if (!view.data) return;
    const int64_t base = p.row * view.batch + begin * view.token + p.hv * view.head;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t row = base + row_of(h) * view.token;
      if (a.value_heads > a.heads) {
        float* out = static_cast<float*>(view.data) + row + t4;
#pragma unroll
        for (int n = h; n < 32; n += 2) {
          if (row_of(h) < tokens) {
            *reinterpret_cast<float2*>(out + n / 2 * 8) = make_float2(d[2 * n], d[2 * n + 1]);
          }
        }
        continue;
      }
      // Two neighbours of a quad swap what makes 4 columns of one group for each.
      const bool odd = lane % 2 == 1;
      T* out = static_cast<T*>(view.data) + row + (odd ? 8 : 0) + lane % 4 / 2 * 4;
#pragma unroll
      for (int n = h; n < 32; n += 4) {
        const uint32_t x = pack<T>(d[2 * n], d[2 * n + 1]);
        const uint32_t y = pack<T>(d[2 * n + 4], d[2 * n + 5]);
        const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? x : y, 1);
        if (row_of(h) < tokens) {
          *reinterpret_cast<uint2*>(out + n / 2 * 8) =
              odd ? make_uint2(other, y) : make_uint2(x, other);
        }
      }
    }
  }

  // What needs no dR: the operands of dP, and dQ.
  __device__ __forceinline__ void query_gradients(Pair& k, Pair& q, const TokenFactors& f,
                                                  int64_t begin, int tokens, uint32_t round,
                                                  int buffer, uint32_t buffer_round) {
    {
      float pair[32], gram[32];
      s.u_full.wait(round);
      fence_products();
      multiply_rows(pair, s.grad_o[0], s.u);
      if constexpr (kDecay) multiply_rows(gram, q, k);
      commit_products();
      wait_products<0>();
      pin(pair);
      if constexpr (kDecay) pin(gram);
      s.factors_full[buffer].wait(buffer_round);
      sync();  // the products of the chunk before have read s.pairs
      make_operands<true>(pair, gram, f);
    }
    sync();
    float d[64];
    s.state_full.wait(round);
    multiply_state(d, s.grad_o[0], s.state);
    arrive_warp(s.grad_o_free[0]);
    if constexpr (kDecay) {
      const float2 sums = row_dots(d, q);
      keep_sums(s.sums.yq, sums.x, sums.y);
    }
    scale_rows(d, f.y);
    pin(d);
    fence_products();
    add_square(d, s.pairs[0], k);
    commit_products();
    wait_products<0>();
    pin(d);
    if (a.qk_l2norm) through_l2norm(d, q, f.query, a.scale);
    store_rows(a.grad_q, d, begin, tokens);
  }

  // d += (scale U) dS^T, U's rows scaled on the way to the registers.
  __device__ __forceinline__ void add_key_writes(float (&d)[64], const TokenFactors& f) {
    const float scale[2] = {f.x[row0], f.x[row0 + 8]};
    pin(d);
#pragma unroll
    for (int i0 = 0; i0 < kDim / 16; i0 += 4) {
      uint32_t x[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ldmatrix_x4_plain(x[i], shared_address(s.u[i0 / 4]) +
                                    tile_offset(16 * warp + lane % 16, i * 16 + lane / 16 * 8));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 value = unpack<T>(x[i][j]);
          x[i][j] = pack<T>(scale[j % 2] * value.x, scale[j % 2] * value.y);
        }
      }
      fence_products();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        product_columns<T>(d, x[i], describe_columns(s.grad_state[i0 / 4][0], kC * 128) + 128 * i,
                           true);
      }
      commit_products();
      wait_products<0>();
      pin(d);
    }
  }

  __device__ __forceinline__ void key_gradients(Pair& k, Pair& q, const TokenFactors& f,
                                                int64_t begin, int tokens, uint32_t round) {
    {
      float pair[32], gram[32];
      fence_products();
      multiply_rows(gram, k, k);
      s.grad_r_full.wait(round);
      fence_products();
      multiply_rows(pair, s.grad_r, s.u);
      commit_products();
      wait_products<0>();
      pin(pair);
      pin(gram);
      sync();  // all have read s.pairs[0]
      make_operands<false>(pair, gram, f);
    }
    float d[64];
    multiply_state(d, s.grad_r, s.state);
    arrive_warp(s.grad_r_free);
    arrive_warp(s.state_free);
    const float2 zk = row_dots(d, k);
    keep_sums(s.sums.zk, zk.x, zk.y);
    scale_rows(d, f.z);
    s.grad_state_full.wait(round);
    add_key_writes(d, f);
    arrive_warp(s.u_free);
    arrive_warp(s.grad_state_free);
    if constexpr (kDecay) {
      const float2 all = row_dots(d, k);
      keep_sums(s.sums.xk, all.x - f.z[row0] * zk.x, all.y - f.z[row0 + 8] * zk.y);
    }
    s.sums_full.arrive();
    sync();  // the operands are there
    fence_products();
    add_square(d, s.pairs[0], k);
    add_square(d, s.pairs[1], q);
    commit_products();
    wait_products<0>();
    pin(d);
    s.key_factor_full.wait(round);
    const float factor[2] = {s.key_factor[row0], s.key_factor[row0 + 8]};
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      const float2 x = pair_at(k, n);
      d[2 * n] += factor[n % 2] * x.x, d[2 * n + 1] += factor[n % 2] * x.y;
    }
    if (a.qk_l2norm) through_l2norm(d, k, f.key_scale, 1.f);
    store_rows(a.grad_k, d, begin, tokens);
  }
};

template <typename T, bool kDecay>
__device__ __forceinline__ void walk_tokens(const ChunkArgs& a, GradientShared& s, const Place& p) {
  static_assert(GradientShared::kStages == 2);
  int thread = threadIdx.x % kWarpgroup;
  // One counter and no more: what lives across chunks spills.
#pragma unroll 1
  for (int step = 0; step < chunks_of(p); ++step) {
    {
      const int stage = step % 2, chunk = reversed(chunks_of(p), step),
                tokens = tokens_of(p, chunk);
      s.tokens_full[stage].wait(step / 2 & 1);
      s.grad_o_full[0].wait(step & 1);
      if (tokens < kC) s.cleared.wait(0);
      hide(thread);
      TokenGradients<T, kDecay>{a, s, p, thread / 32, thread % 32}.query_gradients(
          s.k[stage], s.q[stage], s.factors[stage], p.begin + int64_t{chunk} * kC, tokens, step & 1,
          stage, step / 2 & 1);
    }
    hide(thread);
    hide(step);
    {
      const int stage = step % 2, chunk = reversed(chunks_of(p), step),
                tokens = tokens_of(p, chunk);
      TokenGradients<T, kDecay>{a, s, p, thread / 32, thread % 32}.key_gradients(
          s.k[stage], s.q[stage], s.factors[stage], p.begin + int64_t{chunk} * kC, tokens,
          step & 1);
      arrive_warp(s.tokens_free[stage]);
      arrive_warp(s.factors_free[stage]);
    }
  }
}

}  // namespace efla::cuda::sm90
