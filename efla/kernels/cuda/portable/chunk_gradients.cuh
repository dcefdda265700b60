// The part of the backward that needs no order, one block of 16 (or 8) warps per (chunk, value
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
  using Base::scores, Base::i0, Base::row, Base::column, Base::first;
  using Base::x, Base::y, Base::z, Base::pair, Base::write_dot, Base::state_dot;
  using typename Base::Shared;

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
    row_dots(1, y, s.q, pass, pass > 0);
    row_dots(2, x, s.k, pass, pass > 0);
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
    const TokenScalars<kC, Gate<T>>& w = s.scalars;
    const bool has_decay = a.log_decay.data != nullptr;
    float gram[kPair / 8][4] = {};
#pragma unroll
    for (int k0 = 0; k0 < kK; k0 += 16) {
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
    float rows[2] = {}, most[2] = {};
#pragma unroll
    for (int n = 0; n < kPair / 8; ++n) {
      float columns[2] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int t = row(j), i = i0 + column(n, j);
        const bool inside = scores ? i <= t : i < t;
        const float gate = has_decay ? exp_gate(w.cumulative[t] - w.cumulative[i]) : 1.f;
        // D o dP, or -D o dL / |k_t|
        const float m = inside ? gate * pair[n][j] * s.out_norm[i] : 0.f;
        if (scores) {
          const float both = m * w.query[t] * w.key_scale[i] * gram[n][j];
          rows[j / 2] += both;
          columns[j % 2] += both;
          pair[n][j] = m;
        } else {
          const float l = -m * w.norm[t];
          const float both = l * w.key_scale[t] * w.key_scale[i] * gram[n][j];
          rows[j / 2] += both;
          columns[j % 2] += w.erase[t] * both;
          pair[n][j] = w.erase[t] * l;
        }
        most[0] = fmaxf(most[0], fabsf(direct(i, pair[n][j])));
        most[1] = fmaxf(most[1], fabsf(turned(t, pair[n][j])));
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float sum = sum_column(columns[j]);
        if (lane < 4) s.column_sum[scores][m0 / 16][i0 + column(n, j)] = sum;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_row(rows[half]);
      if (lane % 4 == 0) s.row_sum[wc][row(2 * half)] = sum;
    }
    if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most[i]));
        if (lane == 0) s.most[i][warp] = __uint_as_float(bits);
      }
      __syncthreads();
    }
    store_pairs();
  }

  // Element (t, i) of dL's or dP's part, as it multiplies the row of K at i; and the row at t of K
  // or Q.
  __device__ float direct(int i, float x) const {
    return (scores ? a.scale : 1.f) * x * s.scalars.key_scale[i];
  }
  __device__ float turned(int t, float x) const {
    return (scores ? s.scalars.query[t] : s.scalars.key_scale[t]) * x;
  }

  __device__ void store_pairs() {
    const float lower = side_range<0>().up, query = side_range<1>().up, key = side_range<2>().up;
#pragma unroll
    for (int n = 0; n < kPair / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int t = row(j), i = i0 + column(n, j), at = t * Shared::kPairPitch + i;
        const float x = direct(i, pair[n][j]), y = turned(t, pair[n][j]);
        if (scores) {
          s.query_side[at] = T(query * x);
          s.key_side[at] = T(key * y);
        } else if (i <= t) {
          s.symmetric[at] = T(lower * x);
          s.symmetric[i * Shared::kPairPitch + t] = T(lower * y);
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
            load_two(tile + row(2 * half) * Shared::kPitch + first(pass) + column(n, 0));
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

  // dQ and dK, with respect to the l2-normalised vectors where there are such.
  __device__ void finish_qk(int pass, float (&dq)[kColumns / 8][4], float (&dk)[kColumns / 8][4]) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int t = row(2 * half);
        const float2 k = load_two(s.k + t * Shared::kPitch + first(pass) + column(n, 0));
        dk[n][2 * half] += s.k_factor[t] * k.x;
        dk[n][2 * half + 1] += s.k_factor[t] * k.y;
      }
    }
    add_side<0>(dk, s.k, pass);
    add_side<1>(dq, s.k, pass);
    add_side<2>(dk, s.q, pass);
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
#pragma unroll
    for (int t0 = 0; t0 < kC; t0 += 16) {
      if ((kSide == 1 && t0 > m0) || (kSide == 2 && t0 < m0)) continue;
      const auto left =
          kSide == 2 ? load_a_transposed(s.key_side, Shared::kPairPitch, m0, t0)
                     : load_a(kSide == 0 ? s.symmetric : s.query_side, Shared::kPairPitch, m0, t0);
#pragma unroll
      for (int n = 0; n < kColumns; n += 16) {
        BFragment<T> b[2];
        load_b(b, right, Shared::kPitch, t0, first(pass) + n);
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
          const int at = t * Shared::kPitch + first(p) + column(n, 0);
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
    const int c0 = first(pass);
    Out* out = static_cast<Out*>(view.data) + chunk.row * view.batch +
               (chunk.begin + m0) * view.token + head * view.head + c0;
    if constexpr (sizeof(Out) == 2 && kColumns % 32 == 0) {
      if (has_vectors<Out>(view, a.key_dim)) {
        store_tiles(out, view.token, m, chunk.tokens - m0, a.key_dim - c0);
        return;
      }
    }
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int t = row(j), c = column(n, j);
        if (t < chunk.tokens && c0 + c < a.key_dim) out[(t - m0) * view.token + c] = Out(m[n][j]);
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
__global__ void __launch_bounds__(kGradientThreads<kC>) chunk_gradients_kernel(const ChunkArgs a) {
  using Shared = GradientShared<T, kK, kC>;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto& s = *reinterpret_cast<Shared*>(shared_bytes);

  const int64_t place = blockIdx.x;
  const int hv = blockIdx.x % a.value_heads, group = a.value_heads / a.heads;
  const Chunk chunk = locate(a, blockIdx.x / a.value_heads, kC);
  if (chunk.sequence < 0) return;
  constexpr int kCopyThreads = Shared::kPasses == 2 ? kGradientThreads<kC> : 0;
  load_part<kCopyThreads, kC, kK>(s.k, Shared::kPitch,
                                  element<T>(a.k, chunk.row, chunk.begin, hv / group), a.k.token,
                                  chunk.tokens, a.key_dim, a.vector_k);
  load_part<kCopyThreads, kC, kK>(s.q, Shared::kPitch,
                                  element<T>(a.q, chunk.row, chunk.begin, hv / group), a.q.token,
                                  chunk.tokens, a.key_dim, a.vector_q);
  commit_copies();
  GradientBlock<T, kK, kC> block{{a, s, chunk, place, hv}};
  block.load(0, 0, s.values[0]);
  if (threadIdx.x == 0) s.vector_grad_v = has_vectors<T>(a.grad_v, a.value_dim);
  wait_copies<1>();
  __syncthreads();
  make_scalars<T, kK, kC>(a, chunk, hv, s.k, s.q, s.scalars);
  make_factors(a, s);

  block.add_all_values();
  block.finish_sums();
  __syncthreads();
  finish_scalars(a, s, chunk, hv);
  __syncthreads();
#pragma unroll
  for (int p = 0; p < Shared::kPasses; ++p) {
    block.finish_qk(p, block.grad_q[p], block.grad_k[p]);
  }
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
