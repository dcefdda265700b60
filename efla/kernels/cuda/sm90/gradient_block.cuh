// One chunk's gradients, step by step: what gradients.cuh calls in order.
#pragma once

#include "efla/kernels/cuda/sm90/gradient_shared.cuh"

namespace efla::cuda::sm90 {

template <typename T, bool kDecay>
struct GradientBlock {
  const ChunkArgs& a;
  GradientShared& s;
  const Chunk chunk;
  const int hv;
  const float beta, log_decay;  // of token `thread`, read ahead of the tiles
  const int thread = threadIdx.x, group = thread / kWarpgroup, lane = thread % 32;
  const int warp = thread / 32 % 4;       // in its warpgroup
  const int row0 = 16 * warp + lane / 4;  // of accumulators; and row0 + 8
  const int t4 = lane % 4 * 2;

  // What lies behind the sequence may be anything: zero for the sums over tokens.
  __device__ void clear_slack() {
    const int r = thread / 8;
    if (r >= chunk.tokens) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int p = thread % 8 + 8 * half;
        piece(s.k, r, p) = piece(s.q, r, p) = make_uint4(0, 0, 0, 0);
        piece(s.grad_o, r, p) = piece(s.v, r, p) = make_uint4(0, 0, 0, 0);
      }
    }
    fence_async_proxy();
    __syncthreads();
  }

  // The tokens' scalars, as make_scalars of the portable kernels; but inverse_norm is 1 / |k| of
  // what the step rule sees.
  __device__ void make_scalars() {
    TokenScalars<kC>& w = s.scalars;
    {
      const int r = thread / 8, p = thread % 8;
      const float kk = sum_eight(dot<T>(piece(s.k, r, p), piece(s.k, r, p)) +
                                 dot<T>(piece(s.k, r, p + 8), piece(s.k, r, p + 8)));
      float qq = 0.f;
      if (a.qk_l2norm) {
        qq = sum_eight(dot<T>(piece(s.q, r, p), piece(s.q, r, p)) +
                       dot<T>(piece(s.q, r, p + 8), piece(s.q, r, p + 8)));
      }
      if (p == 0) {
        w.key_scale[r] = a.qk_l2norm ? rsqrtf(kk + 1e-6f) : 1.f;
        w.query[r] = a.scale * (a.qk_l2norm ? rsqrtf(qq + 1e-6f) : 1.f);
        w.lambda[r] = a.qk_l2norm ? kk / (kk + 1e-6f) : kk;
        w.norm[r] = kk > 0.f ? sqrtf(w.lambda[r]) : 1.f;
        w.inverse_norm[r] = 1.f / w.norm[r];
      }
    }
    __syncthreads();
    if (thread < kC) {
      StepCoefficients<float> c{0.f, 0.f, 0.f};
      if (thread < chunk.tokens) {
        c = step_coefficients(a.rule, beta, w.lambda[thread], kDecay, log_decay);
      }
      w.beta[thread] = beta, w.log_decay[thread] = log_decay;
      w.erase[thread] = c.erase, w.write[thread] = c.write;
      float sum = c.log_gate;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, sum, offset);
        if (lane >= offset) sum += other;
      }
      s.half_gate[thread] = sum;
    }
    __syncthreads();
    if (thread < kC) {
      const float half = s.half_gate[31], total = half + s.half_gate[63];
      const float sum = s.half_gate[thread] + (thread >= 32 ? half : 0.f);
      const float gamma = expf(sum), norm = w.norm[thread];
      w.cumulative[thread] = sum;
      if (thread == 0) w.total = total;
      s.z_factor[thread] = -w.erase[thread] * gamma * norm;
      s.x_factor[thread] = expf(total - sum) / norm;
      s.y_factor[thread] = a.scale * gamma;
    }
    __syncthreads();
  }

  // dV = w dR and dR.v, all threads; <S0, dS> where the gate asks for it.
  __device__ void value_gradients() {
    const int r = thread / 8;
    const float write = s.scalars.write[r] * s.scalars.norm[r];
    T* out = static_cast<T*>(a.grad_v.data) + chunk.row * a.grad_v.batch +
             (chunk.begin + r) * a.grad_v.token + hv * a.grad_v.head;
    float sum = 0.f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int p = thread % 8 + 8 * half;
      const uint4 grad = piece(s.grad_r, r, p);
      sum += dot<T>(grad, piece(s.v, r, p));
      const uint32_t g[4] = {grad.x, grad.y, grad.z, grad.w};
      uint32_t v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = unpack<T>(g[i]);
        v[i] = pack<T>(write * x.x, write * x.y);
      }
      if (r < chunk.tokens) {
        *reinterpret_cast<uint4*>(out + 8 * p) = make_uint4(v[0], v[1], v[2], v[3]);
      }
    }
    sum = sum_eight(sum);
    if (thread % 8 == 0) s.write_dot[r] = sum;
  }

  __device__ void state_products() {
    float sum = 0.f;
    const auto* x = reinterpret_cast<const uint4*>(s.state);
    const auto* y = reinterpret_cast<const uint4*>(s.grad_state);
    for (int i = thread; i < kDim * kDim / 8; i += 4 * kWarpgroup) sum += dot<T>(x[i], y[i]);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane == 0) s.state_dot[thread / 32] = sum;
  }

  // d (+)= X S^T for a tile pair x [kC, V] and a transposed state [V, K].
  __device__ void multiply_state(float (&d)[64], unsigned char (&x)[2][kC * 128],
                                 unsigned char (&state)[2][2][kC * 128]) {
    fence_products();
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      const uint64_t left = describe_rows(x[i / 4]) + i % 4 * 2;
      const uint64_t right = describe_columns(state[i / 4][0], kC * 128) + 128 * (i % 4);
      product_shared_columns<T>(d, left, right, i > 0);
    }
    commit_products();
    wait_products<0>();
    pin(d);
  }

  // d += X Y for a C x C tile x and a tile pair y [kC, K].
  __device__ void add_square(float (&d)[64], const unsigned char* x,
                             unsigned char (&y)[2][kC * 128]) {
#pragma unroll
    for (int i = 0; i < kC / 16; ++i) {
      product_shared_columns<T>(d, describe_rows(x) + 2 * i,
                                describe_columns(y[0], kC * 128) + 128 * i, true);
    }
  }

  // d = X Y^T for tile pairs of 128 columns.
  __device__ void multiply_rows(float (&d)[32], unsigned char (&x)[2][kC * 128],
                                unsigned char (&y)[2][kC * 128]) {
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      product_shared<T>(d, describe_rows(x[i / 4]) + i % 4 * 2, describe_rows(y[i / 4]) + i % 4 * 2,
                        i > 0);
    }
  }

  // Elements 2 n, 2 n + 1 of an accumulator [64, 128] lie at row row_of(n), columns column_of(n).
  __device__ __forceinline__ int row_of(int n) const { return row0 + n % 2 * 8; }
  __device__ __forceinline__ int column_of(int n) const { return n / 2 * 8 + t4; }
  __device__ __forceinline__ float2 pair_at(unsigned char (&tiles)[2][kC * 128], int n) const {
    const int c = column_of(n);
    return unpack<T>(
        *reinterpret_cast<const uint32_t*>(tiles[c / 64] + tile_offset(row_of(n), c % 64)));
  }

  // out[t] = sum_c d[t, c] tile[t, c].
  __device__ void row_dots(float (&out)[kC], const float (&d)[64],
                           unsigned char (&tiles)[2][kC * 128]) {
    float sum[2] = {};
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      const float2 x = pair_at(tiles, n);
      sum[n % 2] += d[2 * n] * x.x + d[2 * n + 1] * x.y;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float total = sum_quad(sum[h]);
      if (lane % 4 == 0) out[row0 + 8 * h] = total;
    }
  }

  // The third and fourth warpgroup: from dR U^T and dO U^T to the C x C operands and their sums.
  template <bool kScores>
  __device__ void finish_pairs() {
    const TokenScalars<kC>& w = s.scalars;
    float pair[32], gram[32];
    fence_products();
    multiply_rows(pair, kScores ? s.grad_o : s.grad_r, s.u);
    multiply_rows(gram, kScores ? s.q : s.k, s.k);
    commit_products();
    wait_products<0>();
    pin(pair);
    pin(gram);
    // Blocks of 16 x 16: this warp's rows t, columns i of block `block`.
    const float row_query[2] = {w.query[row0], w.query[row0 + 8]};
    const float row_norm[2] = {w.norm[row0], w.norm[row0 + 8]};
    const float row_erase[2] = {w.erase[row0], w.erase[row0 + 8]};
    const float row_key[2] = {w.key_scale[row0], w.key_scale[row0 + 8]};
    float rows[2] = {};
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      uint32_t direct[4] = {}, turned[4] = {};  // for [t][i] and [i][t]
      if (block <= warp) {
        float columns[4] = {};
#pragma unroll
        for (int n = 0; n < 4; ++n) {  // column group 2 block + n / 2, rows row0 + 8 (n % 2)
          const int h = n % 2, t = row0 + 8 * h, i = 16 * block + n / 2 * 8 + t4;
          const float2 inverse = *reinterpret_cast<const float2*>(&w.inverse_norm[i]);
          const float2 key = *reinterpret_cast<const float2*>(&w.key_scale[i]);
          float m[2] = {pair[8 * block + 2 * n] * inverse.x,
                        pair[8 * block + 2 * n + 1] * inverse.y};
          if constexpr (kDecay) {
            const float2 gate = *reinterpret_cast<const float2*>(&w.cumulative[i]);
            m[0] *= __expf(w.cumulative[t] - gate.x);
            m[1] *= __expf(w.cumulative[t] - gate.y);
          }
          if (block == warp) {
            if (kScores ? i > t : i >= t) m[0] = 0.f;
            if (kScores ? i + 1 > t : i + 1 >= t) m[1] = 0.f;
          }
          const float gx = gram[8 * block + 2 * n] * key.x,
                      gy = gram[8 * block + 2 * n + 1] * key.y;
          if constexpr (kScores) {  // m = D o dP / |k_i|
            const float x = m[0] * row_query[h], y = m[1] * row_query[h];
            rows[h] += x * gx + y * gy;
            columns[n / 2 * 2] += x * gx, columns[n / 2 * 2 + 1] += y * gy;
            direct[n] = pack<T>(a.scale * m[0] * key.x, a.scale * m[1] * key.y);
            turned[n] = pack<T>(x, y);
          } else {  // m = -D o dL / |k_t|
            const float x = -m[0] * row_norm[h], y = -m[1] * row_norm[h];
            rows[h] += row_key[h] * (x * gx + y * gy);
            const float ex = row_erase[h] * x, ey = row_erase[h] * y;
            columns[n / 2 * 2] += row_key[h] * ex * gx;
            columns[n / 2 * 2 + 1] += row_key[h] * ey * gy;
            if (block == warp) {
              if (i < t)
                put<T>(s.symmetric, t, i, ex * key.x), put<T>(s.symmetric, i, t, ex * row_key[h]);
              if (i + 1 < t) {
                put<T>(s.symmetric, t, i + 1, ey * key.y);
                put<T>(s.symmetric, i + 1, t, ey * row_key[h]);
              }
              if (i == t || i + 1 == t) put<T>(s.symmetric, t, t, 0.f);
            }
            direct[n] = pack<T>(ex * key.x, ey * key.y);
            turned[n] = pack<T>(ex * row_key[h], ey * row_key[h]);
          }
        }
        if constexpr (kDecay) {
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            float sum = columns[n];
            sum += __shfl_xor_sync(0xffffffffu, sum, 4);
            sum += __shfl_xor_sync(0xffffffffu, sum, 8);
            sum += __shfl_xor_sync(0xffffffffu, sum, 16);
            if (lane < 4) s.column_sum[kScores][warp][16 * block + n / 2 * 8 + t4 + n % 2] = sum;
          }
        }
      } else if (kDecay && lane < 16) {
        s.column_sum[kScores][warp][16 * block + lane] = 0.f;
      }
      const int direct_at = tile_offset(16 * warp + lane % 16, 16 * block + lane / 16 * 8);
      const int turned_at =
          tile_offset(16 * block + lane / 16 * 8 + lane % 8, 16 * warp + lane / 8 % 2 * 8);
      if (kScores) {  // zero above the diagonal
        stmatrix_x4(shared_address(s.query_side) + direct_at, direct);
        stmatrix_x4_transposed(shared_address(s.key_side) + turned_at, turned);
      } else if (block < warp) {
        stmatrix_x4(shared_address(s.symmetric) + direct_at, direct);
        stmatrix_x4_transposed(shared_address(s.symmetric) + turned_at, turned);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = sum_quad(rows[h]);
      if (lane % 4 == 0) s.row_sum[kScores][row0 + 8 * h] = sum;
    }
    fence_async_proxy();
  }

  // Gradients of the scalars: de, dw, dG, then through the step rule. Threads t < kC of the third
  // warpgroup.
  __device__ void finish_scalars(int t) {
    const TokenScalars<kC>& w = s.scalars;
    const float gamma = expf(w.cumulative[t]);
    const float zk = w.norm[t] * w.key_scale[t] * s.zk[t];
    const float grad_erase = s.row_sum[0][t] - gamma * zk;
    float grad_gate = 0.f;
    if constexpr (kDecay) {
      float columns[2] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        columns[0] += s.column_sum[0][i][t];
        columns[1] += s.column_sum[1][i][t];
      }
      const float yq = w.query[t] * gamma * s.yq[t];
      const float xk = w.key_scale[t] * s.xk[t];
      s.grad_gate[t] = w.erase[t] * s.row_sum[0][t] - columns[0] + s.row_sum[1][t] - columns[1] +
                       yq - w.erase[t] * gamma * zk - xk;
      s.out_dot[t] = xk;
      sync_threads(1, kC);
      for (int i = 0; i < kC; ++i) grad_gate += s.out_dot[i] + (i >= t ? s.grad_gate[i] : 0.f);
      float states = 0.f;
      for (float part : s.state_dot) states += part;
      grad_gate += expf(w.total) * states;
    }
    const auto g =
        step_coefficients_backward(a.rule, w.beta[t], w.lambda[t], kDecay, w.log_decay[t],
                                   {grad_gate, grad_erase, w.norm[t] * s.write_dot[t]});
    s.k_factor[t] = 2.f * g.lambda * w.key_scale[t];
    if (t < chunk.tokens) {
      const auto store = [&](const MutableView& view, float value) {
        if (view.data) {
          static_cast<float*>(
              view.data)[chunk.row * view.batch + (chunk.begin + t) * view.token + hv * view.head] =
              value;
        }
      };
      store(a.grad_beta, g.beta);
      store(a.grad_log_decay, g.log_decay);
    }
  }

  // Backward of x r, r = 1 / |x|: r (g - x r^2 (x.g)), in place. `dots` is the warpgroup's own.
  __device__ void through_l2norm(float (&d)[64], unsigned char (&tiles)[2][kC * 128],
                                 float (&dots)[kC], const float (&scale)[kC], float divide) {
    row_dots(dots, d, tiles);
    __syncwarp();  // a row's sum comes from a lane of the same warp
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      const int t = row_of(n);
      const float r = scale[t] / divide, along = r * r * dots[t];
      const float2 x = pair_at(tiles, n);
      d[2 * n] = r * (d[2 * n] - along * x.x);
      d[2 * n + 1] = r * (d[2 * n + 1] - along * x.y);
    }
  }

  // Writes dQ or dK: through the tiles `staging`, or as float parts of grouped heads.
  __device__ void store_rows(const MutableView& view, const float (&d)[64], bool parts,
                             unsigned char (&staging)[2][kC * 128]) {
    if (!view.data) return;
    const int64_t base = chunk.row * view.batch + chunk.begin * view.token;
    if (parts) {
      float* out = static_cast<float*>(view.data) + base + hv * view.head;
#pragma unroll
      for (int n = 0; n < 32; ++n) {
        if (row_of(n) < chunk.tokens) {
          *reinterpret_cast<float2*>(out + row_of(n) * view.token + column_of(n)) =
              make_float2(d[2 * n], d[2 * n + 1]);
        }
      }
      return;
    }
    const int r = 16 * warp + lane % 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // 16 columns at a time
      uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = pack<T>(d[8 * i + 2 * j], d[8 * i + 2 * j + 1]);
      stmatrix_x4(shared_address(staging[i / 4]) + tile_offset(r, i % 4 * 16 + lane / 16 * 8), x);
    }
    __syncwarp();  // a warp writes and reads its own 16 rows
    T* out = static_cast<T*>(view.data) + base + hv * view.head;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = 16 * warp + 2 * i + lane / 16, p = lane % 16;
      if (row < chunk.tokens) {
        *reinterpret_cast<uint4*>(out + row * view.token + 8 * p) = piece(staging, row, p);
      }
    }
  }

  // k_factor goes from the third warpgroup to the first.
  // Aligned: warps arrive converged, and no second path for others that race checkers misread.
  static __device__ void sync_factors() {
    asm volatile("bar.sync 2, %0;" ::"n"(2 * kWarpgroup) : "memory");
  }

  __device__ void key_gradients(bool parts) {
    float d[64];
    multiply_state(d, s.grad_r, s.state);
    row_dots(s.zk, d, s.k);
    float dots[2] = {};
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      const float factor = s.z_factor[row_of(n)];
      d[2 * n] *= factor, d[2 * n + 1] *= factor;
    }
    // X with U's rows scaled on the way to the registers.
    const float scale[2] = {s.x_factor[row0], s.x_factor[row0 + 8]};
    pin(d);
    fence_products();
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      uint32_t x[4];
      ldmatrix_x4_plain(x, shared_address(s.u[i / 4]) +
                               tile_offset(16 * warp + lane % 16, i % 4 * 16 + lane / 16 * 8));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 value = unpack<T>(x[j]);
        x[j] = pack<T>(scale[j % 2] * value.x, scale[j % 2] * value.y);
      }
      fence_products();
      product_columns<T>(d, x, describe_columns(s.grad_state[i / 4][0], kC * 128) + 128 * (i % 4),
                         true);
      commit_products();
      wait_products<0>();
      pin(d);
    }
    if constexpr (kDecay) {  // gate_k X.k: what has been added to the row sum
#pragma unroll
      for (int n = 0; n < 32; ++n) {
        const float2 x = pair_at(s.k, n);
        dots[n % 2] += d[2 * n] * x.x + d[2 * n + 1] * x.y;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int t = row0 + 8 * h;
        const float total = sum_quad(dots[h]);
        if (lane % 4 == 0) s.xk[t] = total - s.z_factor[t] * s.zk[t];
      }
    }
    __syncthreads();  // sums and C x C operands are there
    sync_factors();
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      const float factor = s.k_factor[row_of(n)];
      const float2 x = pair_at(s.k, n);
      d[2 * n] += factor * x.x, d[2 * n + 1] += factor * x.y;
    }
    pin(d);
    fence_products();
    add_square(d, s.symmetric, s.k);
    add_square(d, s.key_side, s.q);
    commit_products();
    wait_products<0>();
    pin(d);
    if (a.qk_l2norm) through_l2norm(d, s.k, s.key_dot, s.scalars.key_scale, 1.f);
    store_rows(a.grad_k, d, parts, s.grad_r);
  }

  __device__ void query_gradients(bool parts) {
    float d[64];
    multiply_state(d, s.grad_o, s.state);
    if constexpr (kDecay) row_dots(s.yq, d, s.q);
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      const float factor = s.y_factor[row_of(n)];
      d[2 * n] *= factor, d[2 * n + 1] *= factor;
    }
    __syncthreads();
    pin(d);
    fence_products();
    add_square(d, s.query_side, s.k);
    commit_products();
    wait_products<0>();
    pin(d);
    if (a.qk_l2norm) through_l2norm(d, s.q, s.query_dot, s.scalars.query, a.scale);
    store_rows(a.grad_q, d, parts, s.u);
  }
};

}  // namespace efla::cuda::sm90
