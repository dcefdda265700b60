// Norms, step coefficients and the cumulative gate of one chunk's tokens.
#pragma once

#include <type_traits>

#include "efla/flow/long_key.h"
#include "efla/kernels/cuda/portable/chunk_tiles.cuh"

namespace efla::cuda {

// G and its differences. A hard reset puts -1000 into G, and what float then has left of a later
// difference is 1e-4: too coarse for float32 tensors, finer than 16-bit ones show.
template <typename T>
using Gate = std::conditional_t<sizeof(T) == 4, double, float>;

template <typename G>
__device__ __forceinline__ float exp_gate(G x) {
  return expf(static_cast<float>(x));
}

// The keys are used as k_hat = inverse_norm * k (k as stored in the tile, a long one over
// key_unit). Any positive scale would do in its place (docs/kernels.md, "Normalised keys"), so a
// zero key takes 1.
template <int kC, typename G = float>
struct TokenScalars {
  float beta[kC];
  float log_decay[kC];
  float key_unit[kC];      // the key over the tile's row: a power of two, 1 but for long keys
  float query_unit[kC];    // the same of the query, with l2 normalisation only
  float lambda[kC];        // |k|^2 after the optional l2 normalisation
  float key_scale[kC];     // 1 / |k| of the optional l2 normalisation, else 1
  float inverse_norm[kC];  // k_hat / k
  float norm[kC];          // |k| after the optional l2 normalisation (1 for a zero key)
  float query[kC];         // scale, times 1 / |q| of the optional l2 normalisation
  float query_norm[kC];    // |query q|, a bound of P_hat's row
  float erase[kC];         // e
  float write[kC];         // w
  float log_gate[kC];
  G cumulative[kC];  // G, inclusive
  G total;           // G_C
};

// The unit that the step rule sees: a normalised key has none.
template <int kC, typename G>
__device__ __forceinline__ float rule_unit(const ChunkArgs& a, const TokenScalars<kC, G>& s,
                                           int t) {
  return a.qk_l2norm ? 1.f : s.key_unit[t];
}

__device__ __forceinline__ float sum_warp(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// Divides a row of a tile, [kK], by a power of two near its largest element, which it returns;
// `square` becomes that of what is left. Called by a warp. (Half has no long rows.)
template <typename T, int kK>
__device__ __forceinline__ float shorten_row(T* x, float& square) {
  const int lane = threadIdx.x % 32;
  float largest = 0.f;
  for (int c = lane; c < kK; c += 32) largest = fmaxf(largest, fabsf(static_cast<float>(x[c])));
  const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
  const float unit = unit_of(__uint_as_float(bits));
  float sum = 0.f;
  for (int c = lane; c < kK; c += 32) {
    const float y = static_cast<float>(x[c]) * (1.f / unit);
    x[c] = T(y);
    sum += y * y;
  }
  square = sum_warp(sum);
  return unit;
}

// The same for all long rows of a chunk: `square[r]` of row r of the tile, which becomes that of
// what is left; unit[r] is what the row was divided by. Called by the whole block, its warps' rows
// apart; apart, because it hardly ever runs.
template <typename T, int kK, int kC, typename IsLong>
__device__ __forceinline__ void shorten_tile(T* tile, float* square, float* unit, IsLong is_long) {
  for (int r = threadIdx.x / 32; r < kC; r += blockDim.x / 32) {
    float left = square[r];
    if (!is_long(left)) continue;
    const float divisor = shorten_row<T, kK>(tile + r * (kK + kTilePad), left);
    if (threadIdx.x % 32 == 0) square[r] = left, unit[r] = divisor;
  }
}

// Squares of the rows of the tiles k and q [kC, kK], whose long rows it shortens, for
// make_scalars(). Called by a whole block of at least kC threads, which it synchronises.
template <typename T, int kK, int kC>
__device__ void measure_rows(const ChunkArgs& a, T* k, T* q, TokenScalars<kC, Gate<T>>& s) {
  constexpr int kPitch = kK + kTilePad;
  const int lane = threadIdx.x % 32, t = threadIdx.x;
  float(&key_square)[kC] = s.lambda, (&query_square)[kC] = s.query_norm;  // at first
#pragma unroll 2
  for (int r = threadIdx.x / 32; r < kC; r += blockDim.x / 32) {
    float kk = 0.f, qq = 0.f;
#pragma unroll
    for (int c = 2 * lane; c < kK; c += 64) {
      const float2 kx = load_two(k + r * kPitch + c), qx = load_two(q + r * kPitch + c);
      kk += kx.x * kx.x + kx.y * kx.y;
      qq += qx.x * qx.x + qx.y * qx.y;
    }
    // The upper half of the warp adds up the query's.
    float sum = lane < 16 ? kk : qq;
    sum += __shfl_xor_sync(0xffffffffu, lane < 16 ? qq : kk, 16);
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    if (lane % 16 == 0) (lane == 0 ? key_square : query_square)[r] = sum;
  }
  if (t < kC) s.key_unit[t] = s.query_unit[t] = 1.f;
  __syncthreads();
  if constexpr (!std::is_same_v<T, __half>) {
    const auto long_key = [&](float x) {
      return a.qk_l2norm ? is_long(x) : is_long_key(a.rule, x);
    };
    const bool any =
        t < kC && (long_key(key_square[t]) || (a.qk_l2norm && is_long(query_square[t])));
    if (__syncthreads_or(any)) {
      shorten_tile<T, kK, kC>(k, key_square, s.key_unit, long_key);
      if (a.qk_l2norm) {
        shorten_tile<T, kK, kC>(q, query_square, s.query_unit, [](float x) { return is_long(x); });
      }
      __syncthreads();
    }
  }
}

// Synchronises kC threads, the first or others.
template <int kC>
__device__ __forceinline__ void sync_tokens() {
  static_assert(kC == 32 || kC == 64);
  if constexpr (kC == 64) {
    asm volatile("bar.sync %0, 64;" ::"r"(1 + threadIdx.x / 64) : "memory");
  } else {
    __syncwarp();
  }
}

// Fills `s`, which has been through measure_rows(). Called by the first kC threads, while others
// have something else to do.
template <typename T, int kC>
__device__ void make_scalars(const ChunkArgs& a, const Chunk& chunk, int hv,
                             TokenScalars<kC, Gate<T>>& s) {
  const bool has_decay = a.log_decay.data != nullptr;
  const int t = threadIdx.x;
  const float(&key_square)[kC] = s.lambda, (&query_square)[kC] = s.query_norm;
  const float kk = key_square[t], qq = query_square[t];
  const float key_added = s.key_unit[t] == 1.f ? kk + 1e-6f : kk;  // with l2 normalisation
  const float query_added = s.query_unit[t] == 1.f ? qq + 1e-6f : qq;
  s.key_scale[t] = a.qk_l2norm ? rsqrtf(key_added) : 1.f;
  s.query[t] = a.scale * (a.qk_l2norm ? rsqrtf(query_added) : 1.f);
  s.query_norm[t] = fabsf(s.query[t]) * sqrtf(qq);
  s.lambda[t] = a.qk_l2norm ? kk / key_added : kk;
  s.norm[t] = kk > 0.f ? sqrtf(s.lambda[t]) : 1.f;
  s.inverse_norm[t] = kk > 0.f ? rsqrtf(kk) : s.key_scale[t];
  StepCoefficients<float> c{0.f, 0.f, 0.f};
  float beta = 0.f, log_decay = 0.f;
  if (t < chunk.tokens) {
    beta = *element<float>(a.beta, chunk.row, chunk.begin + t, hv);
    if (has_decay) log_decay = *element<float>(a.log_decay, chunk.row, chunk.begin + t, hv);
    c = key_coefficients(a.rule, beta, s.lambda[t], rule_unit(a, s, t), has_decay, log_decay);
  }
  s.beta[t] = beta;
  s.log_decay[t] = log_decay;
  s.erase[t] = c.erase;
  s.write[t] = c.write;
  s.log_gate[t] = c.log_gate;
  s.cumulative[t] = 0;
  if (t == 0) s.total = 0;
  sync_tokens<kC>();
  if (!has_decay) return;
  Gate<T> cumulative = 0;
  for (int i = 0; i < kC; ++i) {
    if (i <= t) cumulative += s.log_gate[i];
  }
  s.cumulative[t] = cumulative;
  if (t == kC - 1) s.total = cumulative;
  sync_tokens<kC>();
}

// What the other threads do meanwhile: meet as often. With barriers of some warps only, racecheck
// does not see the __syncthreads() that follow.
template <int kC>
__device__ __forceinline__ void pass_scalars(const ChunkArgs& a) {
  sync_tokens<kC>();
  if (a.log_decay.data) sync_tokens<kC>();
}

}  // namespace efla::cuda
