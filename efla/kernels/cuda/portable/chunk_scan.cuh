// The serial part of the forward: one block per (sequence, value head, 64 or 128 columns of V), one
// warp per 16 columns, chunk after chunk. A warp keeps its rows of the transposed state S^T [16, K]
// in float registers for the whole sequence and never exchanges anything with the others; every
// product takes its left operand from registers:
//
//   R^T = w V^T - e (S^T K^T)        U^T = R^T A_hat^T
//   O^T = gate_q (S^T Q^T) + U^T P_hat^T
//   S^T = Gamma_C S^T + (gate_k U^T) K
//
// with the per-token scalars of ScalarRow along the columns. Half operands are scaled
// (half_range.cuh); the products with A_hat and P_hat are in half for bfloat16 too. The next
// chunk's tiles are copied while this one is computed.
#pragma once

#include "efla/kernels/cuda/portable/chunk_tiles.cuh"

namespace efla::cuda {

// Warps per block: eight share the chunk's tiles better, four give more blocks.
template <int kWarps>
inline constexpr int kScanColumns = 16 * kWarps;

template <typename T, int kK, int kC, int kWarps>
struct ScanStage {
  static constexpr int kValuePitch = kScanColumns<kWarps> + kTilePad;

  T k[kC * (kK + kTilePad)];
  T q[kC * (kK + kTilePad)];
  T v[kC * kValuePitch];  // later o
  Square<T> inverse[kC * (kC + kTilePad)];
  Square<T> scores[kC * (kC + kTilePad)];
  float scalars[kScanRows * kC];
};

// What every scan needs of a chunk beside its own tensors.
template <bool kScores, int kThreads, typename T, int kK, int kC, int kWarps>
__device__ __forceinline__ void load_prepared(const ChunkArgs& a, ScanStage<T, kK, kC, kWarps>& s,
                                              int64_t place) {
  using S = Square<T>;
  load_lower<kThreads, kC>(s.inverse, static_cast<const S*>(a.inverse) + place * kC * kC);
  if constexpr (kScores) {
    load_lower<kThreads, kC>(s.scores, static_cast<const S*>(a.scores) + place * kC * kC);
  }
  load_part<kThreads, kScanRows, kC>(s.scalars, kC, a.scalars + place * kScalarRows * kC, kC,
                                     kScanRows, kC, true);
}

template <bool kKeep, int kThreads = 0, typename T, int kK, int kC, int kWarps>
__device__ void load_stage(const ChunkArgs& a, ScanStage<T, kK, kC, kWarps>& s, int64_t slot,
                           int64_t row, int64_t begin, int tokens, int hv, int column0) {
  const int hk = hv / (a.value_heads / a.heads);
  load_part<kThreads, kC, kK>(s.k, kK + kTilePad, element<T>(a.k, row, begin, hk), a.k.token,
                              tokens, a.key_dim, a.vector_k);
  if constexpr (!kKeep) {
    load_part<kThreads, kC, kK>(s.q, kK + kTilePad, element<T>(a.q, row, begin, hk), a.q.token,
                                tokens, a.key_dim, a.vector_q);
  }
  load_part<kThreads, kC, kScanColumns<kWarps>>(
      s.v, s.kValuePitch, element<T>(a.v, row, begin, hv) + column0, a.v.token, tokens,
      a.value_dim - column0, a.vector_v);
  load_prepared<!kKeep, kThreads>(a, s, slot * a.value_heads + hv);
  commit_copies();
}

// Divides the rows of a tile [kC, kK] by their units. Called by the whole block; apart, so that
// what hardly ever runs takes no registers of the scans.
template <typename T, int kK, int kC>
__device__ __noinline__ void divide_rows(T* tile, const float* units) {
  for (int i = threadIdx.x; i < kC * kK; i += blockDim.x) {
    T& x = tile[i / kK * (kK + kTilePad) + i % kK];
    x = T(static_cast<float>(x) * (1.f / units[i / kK]));
  }
  __syncthreads();
}

// Long rows of the stage's k, and with kQueries q, as prepare stored them (half has none). Called
// by the whole block once the stage is there.
template <bool kQueries, typename T, int kK, int kC, int kWarps>
__device__ __forceinline__ void shorten_rows(const ChunkArgs& a, ScanStage<T, kK, kC, kWarps>& s,
                                             int64_t place) {
  if constexpr (!std::is_same_v<T, __half>) {
    if (__builtin_expect(s.scalars[kChunkGate * kC + 2] != 0.f, 0)) {
      const float* units = a.scalars + (place * kScalarRows + kKeyUnit) * kC;
      divide_rows<T, kK, kC>(s.k, units);
      if constexpr (kQueries) divide_rows<T, kK, kC>(s.q, units + kC);
    }
  }
}

// C[16, kC] += X^T Y^T for a lower-triangular Y [kC, kC] in shared memory: column t needs rows
// i <= t of X only.
template <typename S, int kC>
__device__ __forceinline__ void multiply_lower(float (&c)[kC / 8][4], const float (&x)[kC / 8][4],
                                               const S* y) {
  const Range range = range_of<S>(x, c);
  multiply_by(c, range.up);
#pragma unroll
  for (int i0 = 0; i0 < kC; i0 += 16) {
    const auto a = as_a<S>(x[i0 / 8], x[i0 / 8 + 1], range.up);
#pragma unroll
    for (int t0 = i0; t0 < kC; t0 += 16) {
      BFragment<S> b[2];
      load_b_transposed(b, y, kC + kTilePad, i0, t0);
      mma<S>(c[t0 / 8], a, b[0]);
      mma<S>(c[t0 / 8 + 1], a, b[1]);
    }
  }
  multiply_by(c, range.down);
}

// state[16, kK] = gamma state + X^T Y for X^T [16, kC] in registers and Y [kC, kK] in shared
// memory.
template <typename T, int kK, int kC>
__device__ __forceinline__ void add_product(float (&state)[kK / 8][4], float gamma,
                                            const float (&x)[kC / 8][4], const T* y) {
  const Range range = range_of<T>(x, state);
  multiply_by(state, gamma * range.up);
#pragma unroll
  for (int i0 = 0; i0 < kC; i0 += 16) {
    const auto a = as_a<T>(x[i0 / 8], x[i0 / 8 + 1], range.up);
#pragma unroll
    for (int n0 = 0; n0 < kK; n0 += 16) {
      BFragment<T> b[2];
      load_b(b, y, kK + kTilePad, i0, n0);
      mma<T>(state[n0 / 8], a, b[0]);
      mma<T>(state[n0 / 8 + 1], a, b[1]);
    }
  }
  multiply_by(state, range.down);
}

// What A_hat as stored must be multiplied by.
template <typename T, int kK, int kC, int kWarps>
__device__ __forceinline__ float inverse_unit(const ScanStage<T, kK, kC, kWarps>& s) {
  return sizeof(T) == 4 ? 1.f : s.scalars[kChunkGate * kC + 1];
}

// One chunk of one warp. Leaves O, or with kKeep U, in the warp's columns of the tile s.v.
template <bool kKeep, typename T, int kK, int kC, int kWarps>
__device__ __forceinline__ void scan_chunk(float (&state)[kK / 8][4],
                                           ScanStage<T, kK, kC, kWarps>& s) {
  constexpr int kPitch = kK + kTilePad, kValuePitch = kScanColumns<kWarps> + kTilePad;
  const int lane = threadIdx.x % 32, t4 = lane % 4 * 2;
  const int column = threadIdx.x / 32 * 16 + lane / 4;  // of V, within the tile; and 8 further on

  float r[kC / 8][4] = {}, o[kC / 8][4] = {};
  const Range range = range_of<T>(state);
#pragma unroll
  for (int k0 = 0; k0 < kK; k0 += 16) {
    const auto a = as_a<T>(state[k0 / 8], state[k0 / 8 + 1], range.up);
#pragma unroll
    for (int n0 = 0; n0 < kC; n0 += 16) {
      BFragment<T> b[2];
      load_b_transposed(b, s.k, kPitch, k0, n0);
      mma<T>(r[n0 / 8], a, b[0]);
      mma<T>(r[n0 / 8 + 1], a, b[1]);
      if constexpr (!kKeep) {
        load_b_transposed(b, s.q, kPitch, k0, n0);
        mma<T>(o[n0 / 8], a, b[0]);
        mma<T>(o[n0 / 8 + 1], a, b[1]);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kC / 8; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int t = n * 8 + t4 + j % 2;
      const float v = static_cast<float>(s.v[t * kValuePitch + column + j / 2 * 8]);
      const float recalled = range.down * r[n][j];
      r[n][j] = s.scalars[kWrite * kC + t] * v - s.scalars[kEraseIn * kC + t] * recalled;
      o[n][j] *= range.down * s.scalars[kQueryGate * kC + t];
    }
  }
  float u[kC / 8][4] = {};
  multiply_lower<Square<T>, kC>(u, r, s.inverse);
  multiply_by(u, inverse_unit(s));
  if constexpr (!kKeep) multiply_lower<Square<T>, kC>(o, u, s.scores);
    // Each warp reads and writes its own 16 columns of the tile only.
#pragma unroll
  for (int n = 0; n < kC / 8; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int t = n * 8 + t4 + j % 2;
      const float out = kKeep ? u[n][j] : s.scalars[kQueryOut * kC + t] * o[n][j];
      s.v[t * kValuePitch + column + j / 2 * 8] = T(out);
      u[n][j] *= s.scalars[kKeyOut * kC + t];
    }
  }
  add_product<T, kK, kC>(state, s.scalars[kChunkGate * kC], u, s.k);
}

// Writes the warp's 16 columns of a tile, `rows` x up to `columns`, to global memory, in 16-byte
// pieces if the target's rows are `vector`s.
template <typename T>
__device__ __forceinline__ void store_columns(T* target, int64_t stride, const T* tile, int pitch,
                                              int rows, int columns, bool vector) {
  const int warp_column = threadIdx.x / 32 * 16;
  __syncwarp();
  if (vector) {
    constexpr int kPer = 16 / sizeof(T), kPieces = 16 / kPer;
    for (int i = threadIdx.x % 32; i < rows * kPieces; i += 32) {
      const int t = i / kPieces, c = warp_column + i % kPieces * kPer;
      if (c < columns) {
        *reinterpret_cast<uint4*>(target + t * stride + c) =
            *reinterpret_cast<const uint4*>(tile + t * pitch + c);
      }
    }
    return;
  }
  for (int i = threadIdx.x % 32; i < rows * 16; i += 32) {
    const int t = i / 16, c = warp_column + i % 16;
    if (c < columns) target[t * stride + c] = tile[t * pitch + c];
  }
}

// Writes the warp's rows of a transposed state, [16, kK], in the storage type.
template <typename T, int kK>
__device__ __forceinline__ void store_state_rows(T* target, const float (&state)[kK / 8][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store_pair(target + (lane / 4 + 8 * half) * kK + n * 8 + lane % 4 * 2, state[n][2 * half],
                 state[n][2 * half + 1]);
    }
  }
}

// Where a block works: sequence, value head, tile of V, and its tokens [first, last).
struct ScanPlace {
  int64_t sequence, row, first, last, slot;
  int hv, column0;
};

__device__ inline ScanPlace scan_place(const ChunkArgs& a, int chunk, int columns) {
  const int tiles = (a.value_dim + columns - 1) / columns;
  ScanPlace p;
  p.sequence = blockIdx.x / (a.value_heads * tiles);
  p.hv = blockIdx.x / tiles % a.value_heads;
  p.column0 = blockIdx.x % tiles * columns;
  p.row = a.cu_seqlens ? 0 : p.sequence;
  p.first = a.cu_seqlens ? a.cu_seqlens[p.sequence] : 0;
  p.last = a.cu_seqlens ? a.cu_seqlens[p.sequence + 1] : a.tokens;
  p.slot = first_slot(a, p.sequence, chunk);
  return p;
}

// Reads or writes a warp's part of a float state [K, V], at most kRows of it from `row` on, those
// before `end`, and 16 columns from `column0` on; `visit(offset, x)` sees each element that exists.
// Element j of state[n]: column lane / 4 (+ 8), row n * 8 + lane % 4 * 2 (+ 1) of S.
template <int kRows, typename Visit>
__device__ __forceinline__ void visit_state(const ChunkArgs& a, const ScanPlace& p,
                                            float (&state)[kRows / 8][4], int row, int end,
                                            int column0, Visit visit) {
  const int lane = threadIdx.x % 32;
  const int column = column0 + lane / 4;
  const int64_t base = (p.sequence * a.value_heads + p.hv) * int64_t{a.key_dim} * a.value_dim;
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int k = row + n * 8 + lane % 4 * 2 + j % 2, v = column + j / 2 * 8;
      if (k < end && v < a.value_dim) visit(base + int64_t{k} * a.value_dim + v, state[n][j]);
    }
  }
}

template <bool kKeep, typename T, int kK, int kC, int kWarps>
__global__ void __launch_bounds__(kWarps * 32) chunk_scan_kernel(const ChunkArgs a) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto* stages = reinterpret_cast<ScanStage<T, kK, kC, kWarps>*>(shared_bytes);
  const ScanPlace p = scan_place(a, kC, kScanColumns<kWarps>);
  const int column = p.column0 + threadIdx.x / 32 * 16;  // the warp's first
  constexpr bool kPieces = kK <= 128;                    // beyond there are no registers for it

  float state[kK / 8][4] = {};
  if (a.initial_state) {
    visit_state<kK>(a, p, state, 0, a.key_dim, column,
                    [&](int64_t i, float& x) { x = a.initial_state[i]; });
  }
  const int64_t chunks = (p.last - p.first + kC - 1) / kC;
  const auto tokens_of = [&](int64_t c) {
    return static_cast<int>(min(int64_t{kC}, p.last - p.first - c * kC));
  };
  const auto load = [&](int64_t c) {
    load_stage<kKeep>(a, stages[c % 2], p.slot + c, p.row, p.first + c * kC, tokens_of(c), p.hv,
                      p.column0);
  };
  if (chunks > 0) load(0);
  for (int64_t c = 0; c < chunks; ++c) {
    auto& stage = stages[c % 2];
    if (c + 1 < chunks) {
      load(c + 1);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    const int64_t place = (p.slot + c) * a.value_heads + p.hv;
    shorten_rows<!kKeep>(a, stage, place);
    if constexpr (kKeep) {
      store_state_rows<T, kK>(static_cast<T*>(a.states) + (place * a.columns + column) * kK, state);
      scan_chunk<kKeep>(state, stage);
      store_columns(static_cast<T*>(a.u) + place * kC * a.columns + p.column0, a.columns, stage.v,
                    stage.kValuePitch, kC, kScanColumns<kWarps>, kPieces);
    } else {
      scan_chunk<kKeep>(state, stage);
      T* o = static_cast<T*>(a.o.data) + p.row * a.o.batch + (p.first + c * kC) * a.o.token +
             p.hv * a.o.head + p.column0;
      store_columns(o, a.o.token, stage.v, stage.kValuePitch, tokens_of(c), a.value_dim - p.column0,
                    kPieces && has_vectors<T>(a.o, a.value_dim));
    }
    __syncthreads();  // the stage is free for the chunk after the next
  }
  if (!kKeep && a.final_state) {
    visit_state<kK>(a, p, state, 0, a.key_dim, column,
                    [&](int64_t i, float& x) { a.final_state[i] = x; });
  }
}

}  // namespace efla::cuda
