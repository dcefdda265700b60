// The warpgroup of the backward walk that makes dQ and dK of a chunk, from what the forward walk
// kept (U, the state S before the chunk) and what the chain of state_gradient.cuh leaves (dR, the
// gradient dS of the state after it). Equations and names are those of the portable
// chunk_gradients.cuh:
//
//   dL = -strictLower(dR U^T)    dP = tril(dO U^T)    Z = dR S^T    Y = dO S^T    X = U dS^T
//   dQ = gate_q Y + scale (D o dP) K
//   dK = (B + B^T + 2 dlambda) K - e Gamma Z + scale (D o dP)^T Q + gate_k X,   B = e (dL o D)
//
// dK is made times 1 / |k| of the optional l2 normalisation, dQ without the scale until the end.
// What needs neither dR nor dS comes first: meanwhile the chain makes them.
#pragma once

#include "efla/kernels/cuda/sm90/square_operands.cuh"

namespace efla::cuda::sm90 {

template <typename T, int kDim, bool kPadded, bool kErase, bool kDecay>
struct TokenGradients {
  static constexpr int kTiles = kDim / 64, kKept = GradientShared<kDim>::kKept;
  const BackwardMaps& maps;
  const ChunkArgs& a;
  GradientShared<kDim>& s;
  const Place& p;
  const int warp, lane;           // of this warpgroup
  const int step;                 // of the walk
  const int kept = step % kKept;  // buffer of dO, U, S, dS, dR
  const uint32_t kept_round = step / kKept & 1;
  const int row0 = 16 * warp + lane / 4;  // of accumulators; and row0 + 8
  const int t4 = lane % 4 * 2;

  static __device__ __forceinline__ void sync() { sync_threads(2, kWarpgroup); }

  // Starts d (+)= X S^T for tiles x [kC, V] and a transposed state [V, K].
  __device__ __forceinline__ void multiply_state(float (&d)[kDim / 2], const Tile* x,
                                                 const Tile (*state)[kTiles], bool add) {
    fence_products();
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      product_shared_columns<T>(d, describe_rows(x[i / 4]) + i % 4 * 2,
                                describe_columns(state[i / 4][0], kC * 128) + 128 * (i % 4),
                                add || i > 0);
    }
    commit_products();
  }

  // Starts d += X Y for a C x C tile x and tiles y [kC, K].
  __device__ __forceinline__ void add_square(float (&d)[kDim / 2], const Tile& x, const Tile* y) {
    fence_products();
#pragma unroll
    for (int i = 0; i < kC / 16; ++i) {
      product_shared_columns<T>(d, describe_rows(x) + 2 * i,
                                describe_columns(y[0], kC * 128) + 128 * i, true);
    }
    commit_products();
  }

  // d = X Y^T for tiles of kDim columns.
  __device__ __forceinline__ void multiply_rows(float (&d)[32], const Tile* x, const Tile* y) {
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      product_shared<T>(d, describe_rows(x[i / 4]) + i % 4 * 2, describe_rows(y[i / 4]) + i % 4 * 2,
                        i > 0);
    }
  }

  // Elements 2 n, 2 n + 1 of an accumulator [64, K] lie at row row_of(n), columns n / 2 * 8 + t4
  // and the next.
  __device__ __forceinline__ int row_of(int n) const { return row0 + n % 2 * 8; }
  __device__ __forceinline__ float2 pair_at(const Tile* tiles, int n) const {
    const int offset = row0 * 128 + ((lane / 4 ^ n / 2 % 8) << 4) + t4 * 2;
    return unpack<T>(
        *reinterpret_cast<const uint32_t*>(tiles[n / 16] + offset + n % 2 * (8 * 128)));
  }

  // sum_c d[t, c] tile[t, c] of rows row0 and row0 + 8, in all lanes of the quad.
  __device__ __forceinline__ float2 row_dots(const float (&d)[kDim / 2], const Tile* tiles) const {
    float sum[2] = {};
#pragma unroll
    for (int n = 0; n < kDim / 4; ++n) {
      const float2 x = pair_at(tiles, n);
      sum[n % 2] += d[2 * n] * x.x + d[2 * n + 1] * x.y;
    }
    return make_float2(sum_quad(sum[0]), sum_quad(sum[1]));
  }

  // The warp's rows of columns 16 i to 16 i + 15, as an operand A.
  __device__ __forceinline__ void load_step(uint32_t (&x)[4], const Tile* tiles, int i) const {
    ldmatrix_x4_plain(x, shared_address(tiles[i / 4]) +
                             tile_offset(16 * warp + lane % 16, i % 4 * 16 + lane / 16 * 8));
  }

  // As row_dots(), with fewer instructions and more registers.
  __device__ __forceinline__ float2 tile_dots(const float (&d)[kDim / 2], const Tile* tiles) const {
    float sum[2][2] = {};
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      uint32_t y[4];
      load_step(y, tiles, i);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float2 x = unpack<T>(y[n]);
        sum[n % 2][0] += d[8 * i + 2 * n] * x.x;
        sum[n % 2][1] += d[8 * i + 2 * n + 1] * x.y;
      }
    }
    return make_float2(sum_quad(sum[0][0] + sum[0][1]), sum_quad(sum[1][0] + sum[1][1]));
  }

  // For the scalars' warps.
  __device__ __forceinline__ void keep_sums(float (&sums)[kC], float x, float y) const {
    if (lane % 4 == 0) sums[row0] = x, sums[row0 + 8] = y;
  }

  __device__ __forceinline__ void scale_rows(float (&d)[kDim / 2], float x, float y) const {
#pragma unroll
    for (int n = 0; n < kDim / 4; ++n) d[2 * n] *= n % 2 ? y : x, d[2 * n + 1] *= n % 2 ? y : x;
  }

  // From the gradients of rows divided by these to those of the rows.
  __device__ __forceinline__ void divide_rows(float (&d)[kDim / 2], const Units& units) const {
    scale_rows(d, units.inverse(row0), units.inverse(row0 + 8));
  }

  // Backward of x r, r = 1 / |x|, in place, from d = r g: r (g - x r^2 (x.g)).
  __device__ __forceinline__ void through_l2norm(float (&d)[kDim / 2], const Tile* tiles, float r0,
                                                 float r1) const {
    const float2 dots = row_dots(d, tiles);
    const float along[2] = {r0 * r0 * dots.x, r1 * r1 * dots.y};
#pragma unroll
    for (int n = 0; n < kDim / 4; ++n) {
      const float2 x = pair_at(tiles, n);
      d[2 * n] -= along[n % 2] * x.x, d[2 * n + 1] -= along[n % 2] * x.y;
    }
  }

  // Writes dQ or dK: a whole chunk through `tiles`, which all have read and are free again once
  // stores_left(); as parts of grouped heads in float.
  __device__ __forceinline__ void store_rows(const MutableView& view, const CUtensorMap& map,
                                             Tile* tiles, const float (&d)[kDim / 2], int64_t begin,
                                             int tokens) const {
    if (!view.data) return;
    const bool grouped = a.value_heads > a.heads;
    if (tokens == kC && !grouped) {
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {  // 16 columns at a time
        uint32_t x[4];
        pack_step<T>(x, &d[8 * i]);
        stmatrix_x4(shared_address(tiles[i / 4]) +
                        tile_offset(16 * warp + lane % 16, i % 4 * 16 + lane / 16 * 8),
                    x);
      }
      fence_async_proxy();
      sync();
      if (warp == 0 && elect_one()) {
        for (int n = 0; n < kTiles; ++n) {
          store_box(map, tiles[n], 64 * n, p.hv, static_cast<int>(begin), static_cast<int>(p.row));
        }
        commit_stores();
      }
      return;
    }
    const int64_t base = p.row * view.batch + begin * view.token + p.hv * view.head + t4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row_of(h) >= tokens) break;
      const int64_t row = base + row_of(h) * view.token;
#pragma unroll
      for (int n = h; n < kDim / 4; n += 2) {
        if (kPadded && n / 2 * 8 >= a.key_dim) break;
        const int64_t at = row + n / 2 * 8;
        if (grouped) {
          *reinterpret_cast<float2*>(static_cast<float*>(view.data) + at) =
              make_float2(d[2 * n], d[2 * n + 1]);
        } else {
          store_pair(static_cast<T*>(view.data) + at, d[2 * n], d[2 * n + 1]);
        }
      }
    }
  }

  // For the thread that sends tiles off: waits until they have been read.
  __device__ __forceinline__ bool stores_left() const {
    if (warp != 0 || lane != 0) return false;
    wait_stores_read<0>();
    return true;
  }

  // s.pairs[0] and s.pairs[1].
  __device__ __forceinline__ void square_operands(const TokenFactors& f, int buffer,
                                                  uint32_t buffer_round) {
    float pair[32];
    s.u_full[kept].wait(kept_round);
    fence_products();
    multiply_rows(pair, s.u[kept], s.grad_o[kept]);
    commit_products();
    s.factors_full[buffer].wait(buffer_round);
    if constexpr (kDecay) s.sums_free.wait((step & 1) ^ 1);
    stores_left();
    sync();  // dK of the chunk before has left s.pairs
    wait_products<0>();
    pin(pair);
    make_upper<T, kDecay>(s, f, pair, warp, lane);
    fence_async_proxy();
    sync();
  }

  __device__ __forceinline__ void query_gradients(const Tile* k, const Tile* q,
                                                  const TokenFactors& f, int64_t begin,
                                                  int tokens) {
    float d[kDim / 2];
    s.state_full[kept].wait(kept_round);
    multiply_state(d, s.grad_o[kept], s.state[kept], false);
    if constexpr (kDecay) {
      wait_products<0>();
      pin(d);
      scale_rows(d, f.y[row0], f.y[row0 + 8]);
      pin(d);
    }
    add_square(d, s.pairs[0], k);
    wait_products<0>();
    pin(d);
    const float scale[2] = {f.query[row0], f.query[row0 + 8]};  // a.scale without l2norm
    if constexpr (kDecay) {
      const float2 sums = tile_dots(d, q);
      keep_sums(s.sums.query, sums.x, sums.y);
    } else {
      scale_rows(d, scale[0], scale[1]);
    }
    if (a.qk_l2norm) through_l2norm(d, q, scale[0] / a.scale, scale[1] / a.scale);
    if (kIsBfloat16<T> && s.whole[step % 2].long_rows) divide_rows(d, f.query_unit);
    s.grad_o_read[kept].wait(kept_round);
    sync();  // all have read s.grad_o and s.pairs[0]
    store_rows(a.grad_q, maps.grad_q, s.grad_o[kept], d, begin, tokens);
  }

  __device__ __forceinline__ void key_gradients(const Tile* k, const Tile* q, const TokenFactors& f,
                                                int64_t begin, int tokens, uint32_t round) {
    float d[kDim / 2];
    float2 zk = make_float2(0.f, 0.f);
    s.grad_r_full[kept].wait(kept_round);
    if constexpr (kErase) {
      multiply_state(d, s.grad_r[kept], s.state[kept], false);
      wait_products<0>();
      pin(d);
      zk = tile_dots(d, k);
      keep_sums(s.sums.zk, zk.x, zk.y);
      if constexpr (kDecay) s.erased_full.arrive();
      scale_rows(d, f.z[row0], f.z[row0 + 8]);
    }
    if constexpr (!kDecay) s.sums_full.arrive();
    if (stores_left()) s.grad_o_free[kept].arrive();
    arrive_warp(s.grad_r_free[kept]);
    arrive_warp(s.state_free[kept]);
    s.grad_state_full[kept].wait(kept_round);
    pin(d);
    multiply_state(d, s.u[kept], s.grad_state[kept], kErase);
    if constexpr (kDecay) {
      // Scaled behind the product, k.X has U's roundings in common with the chain's <S, dS>,
      // against which it cancels.
      wait_products<0>();
      pin(d);
      arrive_warp(s.u_free[kept]);
      arrive_warp(s.grad_state_free[kept]);
      const float x[2] = {f.x[row0], f.x[row0 + 8]};
      if constexpr (kErase) zk.x *= f.z[row0] * x[0], zk.y *= f.z[row0 + 8] * x[1];
      scale_rows(d, x[0], x[1]);
      pin(d);
      add_square(d, s.pairs[1], q);
      wait_products<0>();
      pin(d);
      const float2 all = tile_dots(d, k);
      keep_sums(s.sums.key, all.x - zk.x, all.y - zk.y);
      s.sums_full.arrive();
    } else {
      add_square(d, s.pairs[1], q);
      wait_products<1>();
      arrive_warp(s.u_free[kept]);
      arrive_warp(s.grad_state_free[kept]);
    }
    if constexpr (kErase) {
      s.diagonal_full.wait(round);
      add_square(d, s.pairs[2], k);
    } else if constexpr (!kDecay) {
      s.diagonal_full.wait(round);  // for s.sums, which the next chunk writes
    }
    wait_products<0>();
    pin(d);
    if constexpr (kErase) arrive_warp(s.lower_free);
    if (a.qk_l2norm) through_l2norm(d, k, f.key[row0], f.key[row0 + 8]);
    // Read by the lane that says below that its warp is done with K and Q and what came with them.
    if (kIsBfloat16<T> && __any_sync(0xffffffffu, lane == 0 && s.whole[step % 2].long_rows)) {
      divide_rows(d, f.key_unit);
    }
    sync();  // all have read s.pairs
    store_rows(a.grad_k, maps.grad_k, s.pairs, d, begin, tokens);
  }
};

template <typename T, int kDim, bool kPadded, bool kErase, bool kDecay>
__device__ __forceinline__ void walk_tokens(const BackwardMaps& maps, const ChunkArgs& a,
                                            GradientShared<kDim>& s, const Place& p) {
  using Gradients = TokenGradients<T, kDim, kPadded, kErase, kDecay>;
  constexpr int kKept = GradientShared<kDim>::kKept;
  static_assert(GradientShared<kDim>::kStages == 2);
  int thread = threadIdx.x % kWarpgroup;
  // One counter and no more: what lives across chunks spills.
#pragma unroll 1
  for (int step = 0; step < chunks_of(p); ++step) {
    {
      const int stage = step % 2, chunk = reversed(chunks_of(p), step),
                tokens = tokens_of(p, chunk);
      s.tokens_full[stage].wait(step / 2 & 1);
      s.grad_o_full[step % kKept].wait(step / kKept & 1);
      if (tokens < kC) s.cleared.wait(0);
      hide(thread);
      Gradients{maps, a, s, p, thread / 32, thread % 32, step}.square_operands(s.factors[stage],
                                                                               stage, step / 2 & 1);
    }
    hide(thread);
    hide(step);
    {
      const int stage = step % 2, chunk = reversed(chunks_of(p), step),
                tokens = tokens_of(p, chunk);
      Gradients{maps, a, s, p, thread / 32, thread % 32, step}.query_gradients(
          s.k[stage], s.q[stage], s.factors[stage], p.begin + int64_t{chunk} * kC, tokens);
    }
    hide(thread);
    hide(step);
    {
      const int stage = step % 2, chunk = reversed(chunks_of(p), step),
                tokens = tokens_of(p, chunk);
      Gradients{maps, a, s, p, thread / 32, thread % 32, step}.key_gradients(
          s.k[stage], s.q[stage], s.factors[stage], p.begin + int64_t{chunk} * kC, tokens,
          step & 1);
      give_back(s.tokens_free[stage]);
      s.factors_free[stage].arrive();
    }
  }
  if (elect_one(thread)) wait_stores<0>();
}

}  // namespace efla::cuda::sm90
