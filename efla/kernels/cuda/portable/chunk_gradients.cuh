// The part of the backward that needs no order, one block of 16 or 8 warps per (chunk, value
// head). From U, dR and the states on both sides of the chunk (chunk_scan.cuh, chunk_reverse.cuh)
// it makes every gradient of the chunk (docs/mathematics.md, "Chunkwise form"):
//
//   dL = -strictLower(dR U^T)    dP = tril(dO U^T)    Z = dR S0^T    Y = dO S0^T    X = U dS^T
//   dQ = gate_q Y + scale (D o dP) K        dV = w dR
//   dK = (B + B^T) K - e Gamma Z + scale (D o dP)^T Q + gate_k X + 2 k dlambda,   B = e (dL o D)
//
// and the scalars' gradients from row and column sums of the same matrices. U and dR are stored for
// normalised keys: U_hat = |k| U, dR_hat = dR / |k|. Half keeps the three C x C operands scaled
// (half_range.cuh).
//
// Warp (wr, wc) owns 16 rows (tokens) and 1 / kColumnWarps of the columns: of K (in each pass over
// V of its part of K) for Z, Y, X, dQ, dK, and of [dL | dP] side by side, which the first pass
// makes.
#pragma once

#include "efla/kernels/cuda/portable/chunk_gradients_scalars.cuh"
#include "efla/kernels/cuda/portable/chunk_gradients_values.cuh"

namespace efla::cuda {

template <typename T, int kK, int kC>
struct GradientBlock : GradientValues<T, kK, kC> {
  using Base = GradientValues<T, kK, kC>;
  using Base::a, Base::s, Base::chunk, Base::hv, Base::lane, Base::warp, Base::m0, Base::wc;
  using Base::kColumns, Base::kPair, Base::kPasses, Base::kPerRow, Base::kThreads;
  using Base::scores, Base::i0, Base::row, Base::column, Base::first, Base::whole;
  using Base::x, Base::y, Base::z, Base::pair, Base::write_dot, Base::state_dot;
  using typename Base::Shared;

  const bool has_decay = a.log_decay.data != nullptr;  // nobody else asks for dG
  float grad_q[kPasses][kColumns / 8][4], grad_k[kPasses][kColumns / 8][4];

  __device__ void add_all_values() {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      this->add_pass(pass);
      finish_pass(pass);
    }
  }

  // What Z, Y and X are for, so that the next pass has their registers.
  __device__ void finish_pass(int pass) {
    row_dots(0, z, s.k, pass, pass > 0);
    if (has_decay) {
      row_dots(1, y, s.q, pass, pass > 0);
      row_dots(2, x, s.k, pass, pass > 0);
    }
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int t = row(j);
        y[n][j] *= s.y_factor[t];
        z[n][j] = s.z_factor[t] * z[n][j] + s.x_factor[t] * x[n][j];
      }
    }
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      if (pass == p) {
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
          for (int j = 0; j < 4; ++j) grad_q[p][n][j] = y[n][j], grad_k[p][n][j] = z[n][j];
        }
      }
    }
    if (pass == 0) finish_pairs();
  }

  // The range in which half keeps operand kSide: 0 symmetric, 1 query_side, 2 key_side. Once
  // finish_pairs() has left `most`.
  template <int kSide>
  __device__ Range side_range() const {
    if constexpr (!std::is_same_v<T, __half>) return {};
    constexpr int kWarps = kThreads / 32;  // the first half has dL, the second dP
    const int from = kSide == 0 ? 0 : kWarps / 2;
    float most = 0.f;
    if (lane >= from && lane < from + kWarps / 2) {
      most = kSide == 0 ? fmaxf(s.most[0][lane], s.most[1][lane]) : s.most[kSide == 2][lane];
    }
    return range_of_bits(__reduce_max_sync(0xffffffffu, __float_as_uint(most)));
  }

  // From dR U^T and dO U^T to the three C x C operands, with their row and column sums.
  __device__ void finish_pairs() {
    float gram[kPair / 8][4] = {};  // of dP's only dG needs any
#pragma unroll
    for (int k0 = 0; k0 < kK; k0 += 16) {
      if (k0 == used_keys<kK>(a) || (scores && !has_decay)) break;
      const auto left = load_a(scores ? s.q : s.k, Shared::kPitch, m0, k0);
#pragma unroll
      for (int n = 0; n < kPair; n += 16) {
        if (i0 + n > m0) continue;
        BFragment<T> b[2];
        load_b_transposed(b, s.k, Shared::kPitch, k0, i0 + n);
        mma<T>(gram[n / 8], left, b[0]);
        mma<T>(gram[n / 8 + 1], left, b[1]);
      }
    }
    float most[2] = {};
    if (scores) {
      weigh_pairs<true>(gram, most);
    } else {
      weigh_pairs<false>(gram, most);
    }
    if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most[i]));
        if (lane == 0) s.most[i][warp] = __uint_as_float(bits);
      }
      __syncthreads();
    }
    if (scores) {
      store_pairs<true>();
    } else {
      store_pairs<false>();
    }
  }

  // From dO U^T (kScores) or dR U^T, in `pair`, to D o dP or B, with the sums of their rows and
  // columns. `most` becomes the largest elements that store_pairs() will have.
  template <bool kScores>
  __device__ void weigh_pairs(const float (&gram)[kPair / 8][4], float (&most)[2]) {
    const TokenScalars<kC, Gate<T>>& w = s.scalars;
    float rows[2] = {};
    const float size[2] = {row_of(kScores ? w.query : w.norm, 0),
                           row_of(kScores ? w.query : w.norm, 1)};
    const float erase[2] = {row_of(w.erase, 0), row_of(w.erase, 1)};
    const float key_scale[2] = {row_of(w.key_scale, 0), row_of(w.key_scale, 1)};
#pragma unroll
    for (int n = 0; n < kPair / 8; ++n) {
      float columns[2] = {};
      if (i0 + n / 2 * 16 <= m0) {  // others are zero
        const int i = i0 + column(n, 0);
        const float2 norms = load_two(s.out_norm + i), scales = load_two(w.key_scale + i);
        float gate[4] = {1.f, 1.f, 1.f, 1.f};
        if (has_decay) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            gate[j] = exp_gate(w.cumulative[row(j)] - w.cumulative[i + j % 2]);
          }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int c = i + j % 2, h = j / 2;
          const bool inside = kScores ? c <= row(j) : c < row(j);
          const float scale = j % 2 ? scales.y : scales.x;
          // D o dP, or -D o dL / |k_t|
          const float m = inside ? gate[j] * pair[n][j] * (j % 2 ? norms.y : norms.x) : 0.f;
          if constexpr (kScores) {
            const float both = m * size[h] * scale * gram[n][j];
            rows[h] += both;
            columns[j % 2] += both;
            pair[n][j] = m;
          } else {
            const float l = -m * size[h];
            const float both = l * key_scale[h] * scale * gram[n][j];
            rows[h] += both;
            columns[j % 2] += erase[h] * both;
            pair[n][j] = erase[h] * l;
          }
          most[0] = fmaxf(most[0], fabsf(direct<kScores>(scale, pair[n][j])));
          most[1] = fmaxf(most[1], fabsf((kScores ? size[h] : key_scale[h]) * pair[n][j]));
        }
      }
      if (!has_decay) continue;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float sum = sum_column(columns[j]);
        if (lane < 4) s.column_sum[kScores][m0 / 16][i0 + column(n, j)] = sum;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_row(rows[half]);
      if (lane % 4 == 0) s.row_sum[wc][row(2 * half)] = sum;
    }
  }

  // An element of D o dP or B as it multiplies the row of K at its column, which has `scale`. (As
  // it multiplies the row of Q or K at its own row, it takes that one's.)
  template <bool kScores>
  __device__ float direct(float scale, float x) const {
    return (kScores ? a.scale : 1.f) * x * scale;
  }
  __device__ float row_of(const float (&x)[kC], int half) const { return x[row(2 * half)]; }

  template <bool kScores>
  __device__ void store_pairs() {
    const TokenScalars<kC, Gate<T>>& w = s.scalars;
    auto& p = s.tiles.pairs;
    const float lower = side_range<0>().up, query = side_range<1>().up, key = side_range<2>().up;
    const float turned[2] = {row_of(kScores ? w.query : w.key_scale, 0),
                             row_of(kScores ? w.query : w.key_scale, 1)};
#pragma unroll
    for (int n = 0; n < kPair / 8; ++n) {
      if (i0 + n / 2 * 16 > m0) continue;  // nobody reads it
      const int i = i0 + column(n, 0);
      const float2 scales = load_two(w.key_scale + i);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int t = row(2 * h), at = t * Shared::kPairPitch + i;
        const float left = pair[n][2 * h], right = pair[n][2 * h + 1];
        const float x[2] = {direct<kScores>(scales.x, left), direct<kScores>(scales.y, right)};
        const float y[2] = {turned[h] * left, turned[h] * right};
        if constexpr (kScores) {
          store_pair(p.query_side + at, query * x[0], query * x[1]);
          store_pair(p.key_side + at, key * y[0], key * y[1]);
        } else {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if (i + c > t) continue;
            p.symmetric[at + c] = T(lower * x[c]);
            p.symmetric[(i + c) * Shared::kPairPitch + t] = T(lower * y[c]);
          }
        }
      }
    }
  }

  // dot[which][wc][t] = (or, with `more`, +=) this warp's share of sum_c m[t, c] tile[t, c] over
  // the columns of a pass.
  __device__ void row_dots(int which, const float (&m)[kColumns / 8][4], const T* tile, int pass,
                           bool more) {
    float sum[2] = {};
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 x =
            load_two(tile + row(2 * half) * Shared::kPitch + first(pass, n) + lane % 4 * 2);
        sum[half] += m[n][2 * half] * x.x + m[n][2 * half + 1] * x.y;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = sum_row(sum[half]);
      float& dot = s.dot[which][wc][row(2 * half)];
      if (lane % 4 == 0) dot = more ? dot + total : total;
    }
  }

  // Adds the parts that all threads made while the values passed.
  __device__ void finish_sums() {
#pragma unroll
    for (int offset = kPerRow / 2; offset > 0; offset /= 2) {
      write_dot += __shfl_xor_sync(0xffffffffu, write_dot, offset);
    }
    if (threadIdx.x % kPerRow == 0) s.write_dot[threadIdx.x / kPerRow] = write_dot;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      state_dot += __shfl_xor_sync(0xffffffffu, state_dot, offset);
    }
    if (lane == 0) s.state_dot[warp] = state_dot;
  }

  // dQ and dK, with respect to the l2-normalised vectors where there are such. First what does not
  // need finish_scalars(), which two warps do meanwhile.
  __device__ void multiply_sides(int pass, float (&dq)[kColumns / 8][4],
                                 float (&dk)[kColumns / 8][4]) {
    add_side<0>(dk, s.k, pass);
    add_side<1>(dq, s.k, pass);
    add_side<2>(dk, s.q, pass);
  }
  __device__ void add_keys(int pass, float (&dk)[kColumns / 8][4]) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int t = row(2 * half);
        const float2 k = load_two(s.k + t * Shared::kPitch + first(pass, n) + lane % 4 * 2);
        dk[n][2 * half] += s.k_factor[t] * k.x;
        dk[n][2 * half + 1] += s.k_factor[t] * k.y;
      }
    }
  }

  // d += one of the three C x C operands, as its side_range() has it, times K or Q.
  template <int kSide>
  __device__ void add_side(float (&d)[kColumns / 8][4], const T* right, int pass) {
    if constexpr (std::is_same_v<T, __half>) {
      float sum[kColumns / 8][4] = {};
      multiply_side<kSide>(sum, right, pass);
      const float down = side_range<kSide>().down;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) d[n][j] += down * sum[n][j];
      }
    } else {
      multiply_side<kSide>(d, right, pass);
    }
  }

  template <int kSide>
  __device__ void multiply_side(float (&d)[kColumns / 8][4], const T* right, int pass) {
    const auto& p = s.tiles.pairs;
#pragma unroll
    for (int t0 = 0; t0 < kC; t0 += 16) {
      if ((kSide == 1 && t0 > m0) || (kSide == 2 && t0 < m0)) continue;
      const auto left =
          kSide == 2 ? load_a_transposed(p.key_side, Shared::kPairPitch, m0, t0)
                     : load_a(kSide == 0 ? p.symmetric : p.query_side, Shared::kPairPitch, m0, t0);
#pragma unroll
      for (int n = 0; n < kColumns; n += 16) {
        if (n > 0 && n + 16 == kColumns && !whole()) break;
        BFragment<T> b[2];
        load_b(b, right, Shared::kPitch, t0, first(pass, n / 8));
        mma<T>(d[n / 8], left, b[0]);
        mma<T>(d[n / 8 + 1], left, b[1]);
      }
    }
  }

  // Backward of x r, r = 1 / |x|: r (g - x r^2 (x.g)), on dQ and dK.
  __device__ void through_l2norm() {
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      row_dots(0, grad_q[p], s.q, p, p > 0);
      row_dots(1, grad_k[p], s.k, p, p > 0);
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int t = row(2 * half);
      const float rq = s.scalars.query[t] / a.scale, rk = s.scalars.key_scale[t];
      const float yq = rq * rq * total_dot(s, 0, t), zk = rk * rk * total_dot(s, 1, t);
#pragma unroll
      for (int p = 0; p < kPasses; ++p) {
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          const int at = t * Shared::kPitch + first(p, n) + lane % 4 * 2;
          const float2 q = load_two(s.q + at), k = load_two(s.k + at);
          float(&dq)[4] = grad_q[p][n], (&dk)[4] = grad_k[p][n];
          dq[2 * half] = rq * (dq[2 * half] - yq * q.x);
          dq[2 * half + 1] = rq * (dq[2 * half + 1] - yq * q.y);
          dk[2 * half] = rk * (dk[2 * half] - zk * k.x);
          dk[2 * half + 1] = rk * (dk[2 * half + 1] - zk * k.y);
        }
      }
    }
  }

  // dQ and dK of long rows, from those of the rows as stored.
  __device__ void lengthen(float (&dq)[kColumns / 8][4], float (&dk)[kColumns / 8][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int t = row(2 * half);
      const float key = 1.f / s.scalars.key_unit[t], query = 1.f / s.scalars.query_unit[t];
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; ++j) dq[n][j] *= query, dk[n][j] *= key;
      }
    }
  }

  template <typename Out>
  __device__ void store_rows(const MutableView& view, int head, int pass,
                             const float (&m)[kColumns / 8][4]) const {
    if (!view.data) return;
    Out* out = static_cast<Out*>(view.data) + chunk.row * view.batch +
               (chunk.begin + m0) * view.token + head * view.head;
    if constexpr (sizeof(Out) == 2 && kColumns % 32 == 0) {
      if (has_vectors<Out>(view, a.key_dim)) {
        store_tiles(out, view.token, m, chunk.tokens - m0, a.key_dim,
                    [&](int n) { return first(pass, n); });
        return;
      }
    }
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int t = row(j), c = first(pass, n) + lane % 4 * 2 + j % 2;
        if (t < chunk.tokens && c < a.key_dim) out[(t - m0) * view.token + c] = Out(m[n][j]);
      }
    }
  }

  // dQ and dK to global memory, all of them.
  template <typename Out>
  __device__ void store_all(int head) const {
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      store_rows<Out>(a.grad_q, head, p, grad_q[p]);
      store_rows<Out>(a.grad_k, head, p, grad_k[p]);
    }
  }
};

template <typename T, int kK, int kC>
__global__ void __launch_bounds__(kGradientThreads<kK, kC>, kGradientBlocks<kK, kC>)
    chunk_gradients_kernel(const ChunkArgs a) {
  using Shared = GradientShared<T, kK, kC>;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto& s = *reinterpret_cast<Shared*>(shared_bytes);

  const int64_t place = blockIdx.x;
  const int hv = blockIdx.x % a.value_heads, group = a.value_heads / a.heads;
  const Chunk chunk = locate(a, blockIdx.x / a.value_heads, kC);
  if (chunk.sequence < 0) return;
  constexpr int kCopyThreads = kGradientThreads<kK, kC>;
  load_part<kCopyThreads, kC, kK>(s.k, Shared::kPitch,
                                  element<T>(a.k, chunk.row, chunk.begin, hv / group), a.k.token,
                                  chunk.tokens, a.key_dim, a.vector_k);
  load_part<kCopyThreads, kC, kK>(s.q, Shared::kPitch,
                                  element<T>(a.q, chunk.row, chunk.begin, hv / group), a.q.token,
                                  chunk.tokens, a.key_dim, a.vector_q);
  commit_copies();
  GradientBlock<T, kK, kC> block{{a, s, chunk, place, hv}};
  block.load(0, 0, s.tiles.values[0]);
  if (threadIdx.x == 0) s.vector_grad_v = has_vectors<T>(a.grad_v, a.value_dim);
  wait_copies<1>();
  __syncthreads();
  measure_rows<T, kK, kC>(a, s.k, s.q, s.scalars);
  wait_copies<0>();
  __syncthreads();  // the first tile of V is there: other warps go on to its products
  if (threadIdx.x < kC) {
    make_scalars<T, kC>(a, chunk, hv, s.scalars);
    make_factors(a, s);
  } else {
    pass_scalars<kC>(a);
  }

  block.add_all_values();
  block.finish_sums();
  __syncthreads();
  finish_scalars(a, s, chunk, hv);
#pragma unroll
  for (int p = 0; p < Shared::kPasses; ++p) {
    block.multiply_sides(p, block.grad_q[p], block.grad_k[p]);
  }
  __syncthreads();
#pragma unroll
  for (int p = 0; p < Shared::kPasses; ++p) block.add_keys(p, block.grad_k[p]);
  if (a.qk_l2norm) block.through_l2norm();
  if constexpr (!std::is_same_v<T, __half>) {
#pragma unroll
    for (int p = 0; p < Shared::kPasses; ++p) block.lengthen(block.grad_q[p], block.grad_k[p]);
  }
  if (group > 1) {  // parts per value head, summed by another kernel
    block.template store_all<float>(hv);
  } else {
    block.template store_all<T>(hv);
  }
}

}  // namespace efla::cuda
