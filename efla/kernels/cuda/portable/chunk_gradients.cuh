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
// Warp (wr, wc) owns 16 rows (tokens) and 1 / kColumnWarps of the columns: of K for Z, Y, X, dQ,
// dK, and of [dL | dP] side by side.
#pragma once

#include "efla/kernels/cuda/portable/chunk_gradients_shared.cuh"

namespace efla::cuda {

template <typename T, int kK, int kC>
struct GradientBlock {
  using Shared = GradientShared<T, kK, kC>;
  static constexpr int kColumns = kK / Shared::kColumnWarps;   // of K, per warp
  static constexpr int kPair = 2 * kC / Shared::kColumnWarps;  // of [dL | dP], per warp
  static_assert(kColumns % 16 == 0 && kPair % 16 == 0);

  const ChunkArgs& a;
  Shared& s;
  const Chunk chunk;
  const int64_t place;
  const int hv;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int m0 = warp % Shared::kRowWarps * 16;  // first row
  const int wc = warp / Shared::kRowWarps;
  const int c0 = wc * kColumns;                            // first column of K
  const bool scores = wc >= Shared::kColumnWarps / 2;      // dP rather than dL
  const int i0 = wc % (Shared::kColumnWarps / 2) * kPair;  // first column of dL or dP

  float z[kColumns / 8][4] = {}, y[kColumns / 8][4] = {}, x[kColumns / 8][4] = {};
  float pair[kPair / 8][4] = {};
  float write_dot = 0.f;  // part of dR.v of row threadIdx.x / kPerRow
  float state_dot = 0.f;  // part of <S0, dS>
  static constexpr int kPerRow = kGradientThreads<kC> / kC;

  __device__ int row(int j) const { return m0 + lane / 4 + 8 * (j / 2); }
  __device__ int column(int n, int j) const { return n * 8 + lane % 4 * 2 + j % 2; }

  // Starts the copies of one tile of V.
  __device__ void load_values(int column0, typename Shared::Values& x) {
    const auto* u = static_cast<const T*>(a.u) + place * kC * a.columns + column0;
    const auto* r = static_cast<const T*>(a.grad_r) + place * kC * a.columns + column0;
    const int64_t state0 = (place * a.columns + column0) * kK;
    constexpr int kG = kGradientColumns;
    load_tile<kC, kG>(x.u, Shared::kValuePitch, u, a.columns, kC, kG, true);
    load_tile<kC, kG>(x.r, Shared::kValuePitch, r, a.columns, kC, kG, true);
    load_tile<kC, kG>(x.grad_o, Shared::kValuePitch,
                      element<T>(a.grad_o, chunk.row, chunk.begin, hv) + column0, a.grad_o.token,
                      chunk.tokens, a.value_dim - column0, a.vector_grad_o);
    load_tile<kC, kG>(x.v, Shared::kValuePitch,
                      element<T>(a.v, chunk.row, chunk.begin, hv) + column0, a.v.token,
                      chunk.tokens, a.value_dim - column0, a.vector_v);
    load_tile<kG, kK>(x.state, Shared::kPitch, static_cast<const T*>(a.states) + state0, kK, kG, kK,
                      true);
    load_tile<kG, kK>(x.grad_state, Shared::kPitch, static_cast<const T*>(a.grad_states) + state0,
                      kK, kG, kK, true);
    commit_copies();
  }

  // All tiles of V, the next one's copies under way while one is multiplied.
  __device__ void add_all_values() {
    if constexpr (Shared::kStages == 2) load_values(0, s.values[0]);
    for (int column0 = 0, stage = 0; column0 < a.value_dim; column0 += kGradientColumns) {
      if constexpr (Shared::kStages == 1) load_values(column0, s.values[0]);
      if (Shared::kStages == 2 && column0 + kGradientColumns < a.value_dim) {
        load_values(column0 + kGradientColumns, s.values[1 - stage]);
        wait_copies<1>();
      } else {
        wait_copies<0>();
      }
      __syncthreads();
      add_values(column0, s.values[stage]);
      __syncthreads();
      if constexpr (Shared::kStages == 2) stage = 1 - stage;
    }
  }

  // Products over one tile of V, and what is elementwise in it.
  __device__ void add_values(int column0, const typename Shared::Values& tile) {
#pragma unroll
    for (int v0 = 0; v0 < kGradientColumns; v0 += 16) {
      const auto ar = load_a(tile.r, Shared::kValuePitch, m0, v0);
      const auto ao = load_a(tile.grad_o, Shared::kValuePitch, m0, v0);
      const auto au = load_a(tile.u, Shared::kValuePitch, m0, v0);
      BFragment<T> b[2];
#pragma unroll
      for (int n = 0; n < kPair; n += 16) {
        if (i0 + n > m0) continue;  // above the diagonal
        load_b_transposed(b, tile.u, Shared::kValuePitch, v0, i0 + n);
        mma<T>(pair[n / 8], scores ? ao : ar, b[0]);
        mma<T>(pair[n / 8 + 1], scores ? ao : ar, b[1]);
      }
#pragma unroll
      for (int n = 0; n < kColumns; n += 16) {
        load_b(b, tile.state, Shared::kPitch, v0, c0 + n);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          mma<T>(z[n / 8 + j], ar, b[j]);
          mma<T>(y[n / 8 + j], ao, b[j]);
        }
        load_b(b, tile.grad_state, Shared::kPitch, v0, c0 + n);
        mma<T>(x[n / 8], au, b[0]);
        mma<T>(x[n / 8 + 1], au, b[1]);
      }
    }
    const int t = threadIdx.x / kPerRow;
    T* grad_v = static_cast<T*>(a.grad_v.data) + chunk.row * a.grad_v.batch +
                (chunk.begin + t) * a.grad_v.token + hv * a.grad_v.head + column0;
    const float write = s.scalars.write[t] * s.scalars.norm[t];
    for (int c = threadIdx.x % kPerRow; c < kGradientColumns; c += kPerRow) {
      const float r = static_cast<float>(tile.r[t * Shared::kValuePitch + c]);
      write_dot += r * static_cast<float>(tile.v[t * Shared::kValuePitch + c]);
      if (t < chunk.tokens && column0 + c < a.value_dim) grad_v[c] = T(write * r);
    }
    for (int i = threadIdx.x; i < kGradientColumns * kK; i += kGradientThreads<kC>) {
      const int at = i / kK * Shared::kPitch + i % kK;
      state_dot += static_cast<float>(tile.state[at]) * static_cast<float>(tile.grad_state[at]);
    }
  }

  // The range in which half keeps operand kSide: 0 symmetric, 1 query_side, 2 key_side. Once
  // finish_pairs() has left `most`.
  template <int kSide>
  __device__ Range side_range() const {
    if constexpr (!std::is_same_v<T, __half>) return {};
    constexpr int kWarps = kGradientThreads<kC> / 32;  // the first half has dL, the second dP
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
        const float decay = inside ? exp_gate(w.cumulative[t] - w.cumulative[i]) : 0.f;
        const float m = decay * pair[n][j] / w.norm[i];  // D o dP, or -D o dL / |k_t|
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

  // dot[which][wc][t] = this warp's share of sum_c m[t, c] tile[t, c].
  __device__ void row_dots(int which, const float (&m)[kColumns / 8][4], const T* tile) {
    float sum[2] = {};
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum[j / 2] +=
            m[n][j] * static_cast<float>(tile[row(j) * Shared::kPitch + c0 + column(n, j)]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = sum_row(sum[half]);
      if (lane % 4 == 0) s.dot[which][wc][row(2 * half)] = total;
    }
  }

  __device__ float total_dot(int which, int t) const {
    float sum = 0.f;
    for (int w = 0; w < Shared::kColumnWarps; ++w) sum += s.dot[which][w][t];
    return sum;
  }

  // Gradients of the scalars: de, dw, dG, then through the step rule. One thread per token.
  __device__ void finish_scalars() {
    const TokenScalars<kC, Gate<T>>& w = s.scalars;
    const int t = threadIdx.x;
    float grad_erase = 0.f;
    if (t < kC) {
      const float gamma = exp_gate(w.cumulative[t]), out = exp_gate(w.total - w.cumulative[t]);
      const float zk = w.norm[t] * w.key_scale[t] * total_dot(0, t);
      const float yq = w.query[t] * gamma * total_dot(1, t);
      const float xk = out * w.key_scale[t] / w.norm[t] * total_dot(2, t);
      float rows[2] = {}, columns[2] = {};
      for (int i = 0; i < Shared::kColumnWarps; ++i) {
        rows[i >= Shared::kColumnWarps / 2] += s.row_sum[i][t];
      }
      for (int i = 0; i < Shared::kRowWarps; ++i) {
        columns[0] += s.column_sum[0][i][t];
        columns[1] += s.column_sum[1][i][t];
      }
      grad_erase = rows[0] - gamma * zk;
      s.grad_gate[t] = w.erase[t] * rows[0] - columns[0] + rows[1] - columns[1] + yq -
                       w.erase[t] * gamma * zk - xk;
      s.out_dot[t] = xk;
      s.z_factor[t] = -w.erase[t] * gamma * w.norm[t];
      s.x_factor[t] = out / w.norm[t];
      s.y_factor[t] = a.scale * gamma;
    }
    __syncthreads();
    if (t < kC) {
      Gate<T> grad_gate = 0;
      for (int i = 0; i < kC; ++i) grad_gate += s.out_dot[i] + (i >= t ? s.grad_gate[i] : 0.f);
      float states = 0.f;
      for (float part : s.state_dot) states += part;
      grad_gate += exp_gate(w.total) * states;
      const bool has_decay = a.log_decay.data != nullptr;
      const auto g = key_coefficients_backward(
          a.rule, w.beta[t], w.lambda[t], rule_unit(a, w, t), has_decay, w.log_decay[t],
          {static_cast<float>(grad_gate), grad_erase, w.norm[t] * s.write_dot[t]});
      s.k_factor[t] = 2.f * g.lambda * w.key_scale[t];
      if (t < chunk.tokens) {
        const auto put = [&](const MutableView& view, float value) {
          if (view.data) {
            static_cast<float*>(view.data)[chunk.row * view.batch + (chunk.begin + t) * view.token +
                                           hv * view.head] = value;
          }
        };
        put(a.grad_beta, g.beta);
        put(a.grad_log_decay, g.log_decay);
      }
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

  // dQ in y, dK in z, with respect to the l2-normalised vectors where there are such.
  __device__ void finish_qk() {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int t = row(j);
        const float k = static_cast<float>(s.k[t * Shared::kPitch + c0 + column(n, j)]);
        y[n][j] *= s.y_factor[t];
        z[n][j] = s.z_factor[t] * z[n][j] + s.x_factor[t] * x[n][j] + s.k_factor[t] * k;
      }
    }
    add_side<0>(z, s.k);
    add_side<1>(y, s.k);
    add_side<2>(z, s.q);
  }

  // d += one of the three C x C operands, as its side_range() has it, times K or Q.
  template <int kSide>
  __device__ void add_side(float (&d)[kColumns / 8][4], const T* right) {
    if constexpr (std::is_same_v<T, __half>) {
      float sum[kColumns / 8][4] = {};
      multiply_side<kSide>(sum, right);
      const float down = side_range<kSide>().down;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) d[n][j] += down * sum[n][j];
      }
    } else {
      multiply_side<kSide>(d, right);
    }
  }

  template <int kSide>
  __device__ void multiply_side(float (&d)[kColumns / 8][4], const T* right) {
#pragma unroll
    for (int t0 = 0; t0 < kC; t0 += 16) {
      if ((kSide == 1 && t0 > m0) || (kSide == 2 && t0 < m0)) continue;
      const auto left =
          kSide == 2 ? load_a_transposed(s.key_side, Shared::kPairPitch, m0, t0)
                     : load_a(kSide == 0 ? s.symmetric : s.query_side, Shared::kPairPitch, m0, t0);
#pragma unroll
      for (int n = 0; n < kColumns; n += 16) {
        BFragment<T> b[2];
        load_b(b, right, Shared::kPitch, t0, c0 + n);
        mma<T>(d[n / 8], left, b[0]);
        mma<T>(d[n / 8 + 1], left, b[1]);
      }
    }
  }

  // Backward of x r, r = 1 / |x|: r (g - x r^2 (x.g)), on dQ and dK.
  __device__ void through_l2norm() {
    row_dots(0, y, s.q);
    row_dots(1, z, s.k);
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int t = row(2 * half);
      const float rq = s.scalars.query[t] / a.scale, rk = s.scalars.key_scale[t];
      const float yq = rq * rq * total_dot(0, t), zk = rk * rk * total_dot(1, t);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; ++j) {
          const int at = t * Shared::kPitch + c0 + column(n, j);
          y[n][j] = rq * (y[n][j] - yq * static_cast<float>(s.q[at]));
          z[n][j] = rk * (z[n][j] - zk * static_cast<float>(s.k[at]));
        }
      }
    }
  }

  // dQ and dK of long rows, from those of the rows as stored.
  __device__ void lengthen() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int t = row(2 * half);
      const float key = 1.f / s.scalars.key_unit[t], query = 1.f / s.scalars.query_unit[t];
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; ++j) y[n][j] *= query, z[n][j] *= key;
      }
    }
  }

  template <typename Out>
  __device__ void store_rows(const MutableView& view, int head,
                             const float (&m)[kColumns / 8][4]) const {
    if (!view.data) return;
    Out* out = static_cast<Out*>(view.data) + chunk.row * view.batch + chunk.begin * view.token +
               head * view.head;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int t = row(j), c = c0 + column(n, j);
        if (t < chunk.tokens && c < a.key_dim) out[t * view.token + c] = Out(m[n][j]);
      }
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
  load_tile<kC, kK>(s.k, Shared::kPitch, element<T>(a.k, chunk.row, chunk.begin, hv / group),
                    a.k.token, chunk.tokens, a.key_dim, a.vector_k);
  load_tile<kC, kK>(s.q, Shared::kPitch, element<T>(a.q, chunk.row, chunk.begin, hv / group),
                    a.q.token, chunk.tokens, a.key_dim, a.vector_q);
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  make_scalars<T, kK, kC>(a, chunk, hv, s.k, s.q, s.scalars);

  GradientBlock<T, kK, kC> block{a, s, chunk, place, hv};
  block.add_all_values();
  block.finish_sums();
  block.finish_pairs();
  block.row_dots(0, block.z, s.k);
  block.row_dots(1, block.y, s.q);
  block.row_dots(2, block.x, s.k);
  __syncthreads();
  block.finish_scalars();
  __syncthreads();
  block.finish_qk();
  if (a.qk_l2norm) block.through_l2norm();
  if constexpr (!std::is_same_v<T, __half>) block.lengthen();
  if (group > 1) {  // parts per value head, summed by another kernel
    block.template store_rows<float>(a.grad_q, hv, block.y);
    block.template store_rows<float>(a.grad_k, hv, block.z);
  } else {
    block.template store_rows<T>(a.grad_q, hv, block.y);
    block.template store_rows<T>(a.grad_k, hv, block.z);
  }
}

}  // namespace efla::cuda
