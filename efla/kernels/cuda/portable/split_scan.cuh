// The forward scan of chunk_scan.cuh for 16-bit tensors and chunks of 64, where a block has 64
// columns of V. Two warps share 16 columns, with half of the rows of the state S each: half the
// registers, so that there are two warps for each scheduler, and of S^T K^T and S^T Q^T a warp
// makes a summand, over its rows. These pass through shared memory. Both warps of a pair then make
// all of R and U, which saves another exchange; each makes O, and writes O or U, of half of the
// chunk's tokens.
//
// A block has four pairs and a multiprocessor to itself.
#pragma once

#include "efla/kernels/cuda/portable/chunk_scan.cuh"

namespace efla::cuda {

inline constexpr int kPairs = 4;
inline constexpr int kSplitThreads = 64 * kPairs;

template <typename T, int kK, int kC>
struct SplitShared {
  using Stage = ScanStage<T, kK, kC, kPairs>;
  Stage stages[2];
  float4 sums[2 * kPairs][kC / 8][32];  // a warp's summands for the other one of its pair
};

// What a warp is in charge of. Where K ends 32 before kK, the last 16 of the warp's rows are not
// used.
template <int kK, int kC>
struct SplitWarp {
  static constexpr int kRows = kK / 2;
  const int lane = threadIdx.x % 32;
  const int pair = threadIdx.x / 64, half = threadIdx.x / 32 % 2;
  const int column = pair * 16;     // of the block's columns of V
  const int token = half * kC / 2;  // of the chunk, where tokens are shared out
  const int rows;                   // of S
  const int row = half * rows;
  const bool busy;  // the pair has columns that somebody reads, who takes 32 at a time

  __device__ SplitWarp(const ChunkArgs& a, const ScanPlace& p)
      : rows(used_keys<kK>(a) / 2), busy(p.column0 + column < (a.value_dim + 31) / 32 * 32) {}
  // Whether half of the warps have no columns: then these copy the tiles, for the others are what
  // everybody waits for.
  __device__ bool idle_half(const ChunkArgs& a, const ScanPlace& p, bool vectors) const {
    return kK <= 128 && a.value_dim - p.column0 <= 32 && vectors && a.vector_k && a.vector_q;
  }
  __device__ bool whole() const { return kK > 128 || rows == kRows; }
  __device__ int end(const ChunkArgs& a) const { return min(a.key_dim, row + rows); }

  __device__ __forceinline__ void sync() const {
    asm volatile("bar.sync %0, 64;" ::"r"(1 + pair) : "memory");
  }
};

// x[16, kC] += S^T Y^T over the warp's rows of the state, operands in registers; without the last
// 16 of them unless `whole`.
template <typename T, int kRows, int kC, int kPitch>
__device__ __forceinline__ void multiply_state(float (&x)[kC / 8][4],
                                               const AFragment<T> (&state)[kRows / 16], const T* y,
                                               bool whole) {
#pragma unroll
  for (int k0 = 0; k0 < kRows; k0 += 16) {
    if (k0 + 16 == kRows && !whole) break;
#pragma unroll
    for (int n0 = 0; n0 < kC; n0 += 16) {
      BFragment<T> b[2];
      load_b_transposed(b, y, kPitch, k0, n0);
      mma<T>(x[n0 / 8], state[k0 / 16], b[0]);
      mma<T>(x[n0 / 8 + 1], state[k0 / 16], b[1]);
    }
  }
}

template <typename T, int kRows>
__device__ __forceinline__ void state_operand(AFragment<T> (&a)[kRows / 16],
                                              const float (&state)[kRows / 8][4], float up) {
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) a[k] = as_a<T>(state[2 * k], state[2 * k + 1], up);
}

// add_product() for the warp's rows of the state, without the last 16 of them unless `whole`.
template <typename T, int kRows, int kC, int kPitch>
__device__ __forceinline__ void add_to_state(float (&state)[kRows / 8][4], float gamma,
                                             const float (&x)[kC / 8][4], const T* y, bool whole) {
  const Range range = range_of<T>(x, state);
  multiply_by(state, gamma * range.up);
  AFragment<T> a[kC / 16];
#pragma unroll
  for (int i = 0; i < kC / 16; ++i) a[i] = as_a<T>(x[2 * i], x[2 * i + 1], range.up);
#pragma unroll
  for (int n0 = 0; n0 < kRows; n0 += 16) {
    if (n0 + 16 == kRows && !whole) break;
#pragma unroll
    for (int i = 0; i < kC / 16; ++i) {
      BFragment<T> b[2];
      load_b(b, y, kPitch, 16 * i, n0);
      mma<T>(state[n0 / 8], a[i], b[0]);
      mma<T>(state[n0 / 8 + 1], a[i], b[1]);
    }
  }
  multiply_by(state, range.down);
}

// A warp's 16 columns of a tile [kC, columns of V], as C tiles of its transpose are laid out.
template <typename T, int kC>
__device__ __forceinline__ void load_columns(AFragment<T> (&x)[kC / 16], const T* tile, int pitch,
                                             int column) {
#pragma unroll
  for (int n = 0; n < kC / 16; ++n) x[n] = load_a_transposed(tile, pitch, column, 16 * n);
}

// Element (2 i, 2 i + 1) of C tile n.
template <typename T, int kTiles>
__device__ __forceinline__ float2 two_of(const AFragment<T> (&x)[kTiles], int n, int i) {
  return load_two(reinterpret_cast<const T*>(&x[n / 2].x[n % 2 * 2 + i]));
}

template <int kTiles>
__device__ __forceinline__ void put_sums(float4 (*to)[32], const float (&x)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    to[n][threadIdx.x % 32] = make_float4(x[n][0], x[n][1], x[n][2], x[n][3]);
  }
}

template <int kTiles>
__device__ __forceinline__ void add_sums(float (&x)[kTiles][4], const float4 (*from)[32]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float4 y = from[n][threadIdx.x % 32];
    x[n][0] += y.x, x[n][1] += y.y, x[n][2] += y.z, x[n][3] += y.w;
  }
}

// Those C tiles that belong to one half of the tokens.
template <int kTiles>
__device__ __forceinline__ void take_half(float (&x)[kTiles][4], const float (&all)[2 * kTiles][4],
                                          int half) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) x[n][j] = half ? all[n + kTiles][j] : all[n][j];
  }
}

// multiply_lower() for the columns of C that belong to one half of the tokens.
template <typename S, int kC>
__device__ __forceinline__ void multiply_lower_half(float (&c)[kC / 16][4],
                                                    const float (&x)[kC / 8][4], const S* y,
                                                    int half) {
  const Range range = range_of<S>(x, c);
  multiply_by(c, range.up);
#pragma unroll
  for (int i0 = 0; i0 < kC; i0 += 16) {
    if (i0 >= kC / 2 && !half) break;
    const auto a = as_a<S>(x[i0 / 8], x[i0 / 8 + 1], range.up);
#pragma unroll
    for (int n0 = 0; n0 < kC / 2; n0 += 16) {
      if (i0 > half * (kC / 2) + n0) continue;
      BFragment<S> b[2];
      load_b_transposed(b, y, kC + kTilePad, i0, half * (kC / 2) + n0);
      mma<S>(c[n0 / 8], a, b[0]);
      mma<S>(c[n0 / 8 + 1], a, b[1]);
    }
  }
  multiply_by(c, range.down);
}

// Writes 16 columns and half of the tokens of a transposed result into a tile [kC, columns of V],
// and from there the first `rows` of its rows to global memory, `columns` of them.
template <typename T, int kTiles>
__device__ __forceinline__ void store_columns_half(T* target, int64_t stride, T* tile, int pitch,
                                                   const float (&x)[kTiles][4], int rows,
                                                   int columns, bool vector) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      tile[(n * 8 + lane % 4 * 2 + j % 2) * pitch + lane / 4 + j / 2 * 8] = T(x[n][j]);
    }
  }
  __syncwarp();
  if (vector) {
    const int c = lane % 2 * 8;
#pragma unroll
    for (int r0 = 0; r0 < 8 * kTiles; r0 += 16) {
      const int r = r0 + lane / 2;
      if (r < rows && c < columns) {
        *reinterpret_cast<uint4*>(target + r * stride + c) =
            *reinterpret_cast<const uint4*>(tile + r * pitch + c);
      }
    }
  } else {
    for (int i = lane; i < 8 * kTiles * 16; i += 32) {
      const int r = i / 16, c = i % 16;
      if (r < rows && c < columns) target[r * stride + c] = tile[r * pitch + c];
    }
  }
}

// Pairs of a row of the scalars, along the columns of C tile n.
template <int kC>
__device__ __forceinline__ float2 scalars_of(const float* scalars, int row, int n) {
  return *reinterpret_cast<const float2*>(scalars + row * kC + n * 8 + threadIdx.x % 4 * 2);
}

// x's columns times a row of the scalars.
template <int kC, int kTiles>
__device__ __forceinline__ void multiply_columns(float (&x)[kTiles][4], const float* scalars,
                                                 int row, int n0 = 0) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float2 y = scalars_of<kC>(scalars, row, n0 + n);
    x[n][0] *= y.x, x[n][1] *= y.y, x[n][2] *= y.x, x[n][3] *= y.y;
  }
}

// One chunk of one warp. Leaves its share of O, or with kKeep of U, in `out`.
template <bool kKeep, typename T, int kK, int kC>
__device__ __forceinline__ void split_chunk(float (&state)[kK / 16][4], float (&out)[kC / 16][4],
                                            SplitShared<T, kK, kC>& shared,
                                            const ScanStage<T, kK, kC, kPairs>& s,
                                            const SplitWarp<kK, kC>& w) {
  using Warp = SplitWarp<kK, kC>;
  constexpr int kPitch = kK + kTilePad;
  auto* mine = shared.sums[2 * w.pair + w.half];
  const auto* others = shared.sums[2 * w.pair + 1 - w.half];

  AFragment<T> operand[Warp::kRows / 16], v[kC / 16];
  const Range range = range_of<T>(state);
  state_operand<T, Warp::kRows>(operand, state, range.up);
  float r[kC / 8][4] = {};
  multiply_state<T, Warp::kRows, kC, kPitch>(r, operand, s.k + w.row, w.whole());
  multiply_by(r, range.down);
  put_sums(mine, r);
  load_columns<T, kC>(v, s.v, s.kValuePitch, w.column);
  w.sync();
  add_sums(r, others);
  if constexpr (!kKeep) {
    float o[kC / 8][4] = {};
    multiply_state<T, Warp::kRows, kC, kPitch>(o, operand, s.q + w.row, w.whole());
    multiply_by(o, range.down);
    float other[kC / 16][4];
    take_half(out, o, w.half);
    take_half(other, o, 1 - w.half);
    w.sync();  // the summands of R have been read
    put_sums(mine, other);
  }
#pragma unroll
  for (int n = 0; n < kC / 8; ++n) {
    const float2 write = scalars_of<kC>(s.scalars, kWrite, n);
    const float2 erase = scalars_of<kC>(s.scalars, kEraseIn, n);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 x = two_of(v, n, i);
      r[n][2 * i] = write.x * x.x - erase.x * r[n][2 * i];
      r[n][2 * i + 1] = write.y * x.y - erase.y * r[n][2 * i + 1];
    }
  }
  float u[kC / 8][4] = {};
  multiply_lower<Square<T>, kC>(u, r, s.inverse);
  multiply_by(u, inverse_unit(s));
  if constexpr (kKeep) {
    take_half(out, u, w.half);
  } else {
    w.sync();
    add_sums(out, others);
    multiply_columns<kC>(out, s.scalars, kQueryGate, w.token / 8);
    multiply_lower_half<Square<T>, kC>(out, u, s.scores, w.half);
    multiply_columns<kC>(out, s.scalars, kQueryOut, w.token / 8);
  }
  multiply_columns<kC>(u, s.scalars, kKeyOut);
  add_to_state<T, Warp::kRows, kC, kPitch>(state, s.scalars[kChunkGate * kC], u, s.k + w.row,
                                           w.whole());
}

template <bool kKeep, typename T, int kK, int kC>
__global__ void __launch_bounds__(kSplitThreads) split_scan_kernel(const ChunkArgs a) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<SplitShared<T, kK, kC>*>(shared_bytes);
  const ScanPlace p = scan_place(a, kC, kScanColumns<kPairs>);
  const SplitWarp<kK, kC> w(a, p);
  const int column = p.column0 + w.column;
  const bool vector = kKeep || has_vectors<T>(a.o, a.value_dim);

  float state[kK / 16][4] = {};
  if (a.initial_state) {
    visit_state<kK / 2>(a, p, state, w.row, w.end(a), column,
                        [&](int64_t i, float& x) { x = a.initial_state[i]; });
  }
  const int64_t chunks = (p.last - p.first + kC - 1) / kC;
  const auto tokens_of = [&](int64_t c) {
    return static_cast<int>(min(int64_t{kC}, p.last - p.first - c * kC));
  };
  const bool idle_half = w.idle_half(a, p, a.vector_v);
  const auto load = [&](int64_t c) {
    auto& stage = shared.stages[c % 2];
    if (!idle_half) {
      load_stage<kKeep, kSplitThreads>(a, stage, p.slot + c, p.row, p.first + c * kC, tokens_of(c),
                                       p.hv, p.column0);
    } else if (!w.busy) {
      load_stage<kKeep, kSplitThreads / 2>(a, stage, p.slot + c, p.row, p.first + c * kC,
                                           tokens_of(c), p.hv, p.column0);
    }
  };
  if (chunks > 0) load(0);
  for (int64_t c = 0; c < chunks; ++c) {
    auto& stage = shared.stages[c % 2];
    wait_copies<0>();
    __syncthreads();  // and the other stage has been read
    if (c + 1 < chunks) load(c + 1);
    const int64_t place = (p.slot + c) * a.value_heads + p.hv;
    shorten_rows<!kKeep>(a, stage, place);
    if (!w.busy) continue;
    float out[kC / 16][4];
    if constexpr (kKeep) {
      store_tiles(static_cast<T*>(a.states) + (place * a.columns + column) * kK + w.row, kK, state,
                  16, w.rows);
    }
    split_chunk<kKeep>(state, out, shared, stage, w);
    T* tile = stage.v + w.token * stage.kValuePitch + w.column;
    if constexpr (kKeep) {
      store_columns_half(static_cast<T*>(a.u) + (place * kC + w.token) * a.columns + column,
                         a.columns, tile, stage.kValuePitch, out, kC, 16, true);
    } else {
      T* o = static_cast<T*>(a.o.data) + p.row * a.o.batch +
             (p.first + c * kC + w.token) * a.o.token + p.hv * a.o.head + column;
      store_columns_half(o, a.o.token, tile, stage.kValuePitch, out, tokens_of(c) - w.token,
                         a.value_dim - column, vector);
    }
  }
  if (!kKeep && a.final_state) {
    visit_state<kK / 2>(a, p, state, w.row, w.end(a), column,
                        [&](int64_t i, float& x) { a.final_state[i] = x; });
  }
}

}  // namespace efla::cuda
