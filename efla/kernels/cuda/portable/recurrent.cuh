// The recurrence token by token, and with T = 1 the decode step: bound by one read and one write of
// the state.
//
// A block owns kColumns columns of a state [K, V] in registers for all its tokens: a thread has
// kVec columns, which are 16 bytes where the state allows it, of every kParts-th row, so that what
// the block moves at a time lies together.
// The state's loads are issued first. While they are under way, warp w prepares token w of the next
// kWarps ones: it divides k and q by their norms or by a power of two if they are long
// (flow/long_key.h), leaves them in shared memory and makes the coefficients. Then, per token, with
// gamma = e^g and u = w v - gamma e S^T k (docs/mathematics.md, "One step in one pass"),
//
//   S <- gamma S + k u^T ,     o = scale (gamma S_old^T q + (k.q) u) :
//
// all threads sum S^T k and S^T q over their rows; one thread per column adds up the parts of the
// first and makes u, another those of the second; then all take u to their rows of the state, and o
// is made. No order of additions depends on time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "efla/flow/long_key.h"
#include "efla/kernels/params.h"

namespace efla::cuda::recurrent {

inline constexpr float kL2Eps = 1e-6f;
inline constexpr bool kStream = true;  // states go through the cache as what is not needed again

// Everything the kernel reads, by value.
struct Args {
  View q, k, v, beta, log_decay;
  MutableView o;
  const void* state_in;          // State; null: zero
  void* state_out;               // State; null: not wanted
  const int64_t* state_indices;  // null: row b
  int64_t pool_size;
  const int64_t* cu_seqlens;  // null: dense
  int64_t tokens;
  int64_t first_sequence;  // of this launch
  int value_heads, group;  // value heads; those that share a key head
  int key_dim, value_dim;
  float scale;
  DType dtype;  // of q, k, v and o
  Rule rule;
  bool qk_l2norm;
};

// How the work of a block is cut. kExact: K = kKey, and no tile reaches beyond V.
template <int kKey_, int kColumns_, int kWarps_, int kVec_, bool kExact_>
struct Cut {
  static constexpr int kKey = kKey_, kColumns = kColumns_, kWarps = kWarps_, kVec = kVec_;
  static constexpr bool kExact = kExact_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kColumnLanes = kColumns / kVec;     // lanes of a warp side by side
  static constexpr int kRowLanes = 32 / kColumnLanes;      // and above each other
  static constexpr int kRows = kKey / kWarps / kRowLanes;  // of a thread
  static constexpr int kElements = kKey / 32;              // of k that a lane prepares
  static constexpr int kParts = kRowLanes * kWarps;        // that K is cut into, row by row in turn
  // Of a multiprocessor: 128 registers a thread, fewer where that is enough. The largest keys need
  // more.
  static constexpr int kState = kRows * kVec;
  static constexpr int kBlocks = kKey > 256 ? 1 : (kExact&& kState <= 32 ? 20 : 16) / kWarps;
  static_assert(kColumnLanes * kRowLanes == 32 && kRows * kParts == kKey);
  static_assert(kRows % 4 == 0 && 2 * kColumns <= kThreads);
};

// What a token's step needs beside its k and q.
struct Scalars {
  float gamma;  // e^g
  float erase;  // gamma e
  float write;  // w
  float kq;     // (k.q) scale
};

template <typename C>
struct Shared {
  // Of up to kWarps tokens, part after part: k, of unit length with l2norm and divided if it is
  // long; q, likewise and times the scale.
  alignas(16) float k[C::kWarps][C::kKey];
  alignas(16) float q[C::kWarps][C::kKey];
  Scalars scalars[C::kWarps];
  // Of the token at hand.
  alignas(16) float sums[2][C::kParts][C::kColumns];  // of S^T k and S^T q, for a thread's rows
  alignas(16) float u[C::kColumns];
};

template <typename T>
__device__ __forceinline__ float to_float(T x) {
  return static_cast<float>(x);
}

// The storage type of q, k, v and o is known when the kernel runs, not before: a kernel for each
// would be three times the code for what moves few of the bytes.
template <typename AnyView>
__device__ __forceinline__ int64_t index(const AnyView& view, int64_t b, int64_t t, int64_t h) {
  return b * view.batch + t * view.token + h * view.head;
}

__device__ __forceinline__ float load_float(const View& view, int64_t b, int64_t t, int64_t h) {
  return static_cast<const float*>(view.data)[index(view, b, t, h)];
}

__device__ __forceinline__ uint32_t load_bits(DType dtype, const View& view, int64_t i) {
  return dtype == DType::kFloat32 ? static_cast<const uint32_t*>(view.data)[i]
                                  : static_cast<const uint16_t*>(view.data)[i];
}

__device__ __forceinline__ float from_bits(DType dtype, uint32_t bits) {
  if (dtype == DType::kFloat16) return to_float(__ushort_as_half(static_cast<uint16_t>(bits)));
  return __uint_as_float(dtype == DType::kFloat32 ? bits : bits << 16);
}

__device__ __forceinline__ void store_value(DType dtype, const MutableView& view, int64_t i,
                                            float x) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(view.data)[i] = x;
  } else {
    static_cast<uint16_t*>(view.data)[i] = dtype == DType::kFloat16
                                               ? __half_as_ushort(__half(x))
                                               : __bfloat16_as_ushort(__nv_bfloat16(x));
  }
}

// A lane's part of a token, as loaded: elements lane, lane + 32, ... of k and q.
template <int kElements>
struct Row {
  uint32_t k[kElements], q[kElements];
  float beta, log_decay;
};

template <typename C>
__device__ __forceinline__ void load_row(const Args& a, int64_t b, int64_t t, int hv,
                                         Row<C::kElements>& row) {
  const int lane = threadIdx.x % 32;
  const int hk = a.group == 1 ? hv : hv / a.group;
  const int64_t k = index(a.k, b, t, hk) + lane, q = index(a.q, b, t, hk) + lane;
#pragma unroll
  for (int i = 0; i < C::kElements; ++i) {
    const bool inside = C::kExact || lane + 32 * i < a.key_dim;
    row.k[i] = inside ? load_bits(a.dtype, a.k, k + 32 * i) : 0;
    row.q[i] = inside ? load_bits(a.dtype, a.q, q + 32 * i) : 0;
  }
  row.beta = load_float(a.beta, b, t, hv);
  row.log_decay = a.log_decay.data ? load_float(a.log_decay, b, t, hv) : 0.f;
}

// What a row must be divided by beside `unit`, a power of two near its length; 1: nothing, it is
// not long. An infinite square takes two turns, the second of which has a finite one; a third would
// mean that the row itself is infinite.
__device__ __forceinline__ float excess(float square, float unit) {
  if (!is_long(square)) return 1.f;
  if (square > FLT_MAX) return unit > 1.f ? 1.f : 0x1p80f;
  return fminf(unit_of(sqrtf(square)), 0x1p126f / unit);
}

// Makes a token of the warp's rows and leaves it at `token` in shared memory.
template <typename C>
__device__ __forceinline__ void prepare_token(const Args& a, const Row<C::kElements>& row,
                                              int token, Shared<C>& shared) {
  const int lane = threadIdx.x % 32;
  float k[C::kElements], q[C::kElements];
#pragma unroll
  for (int i = 0; i < C::kElements; ++i) {
    k[i] = from_bits(a.dtype, row.k[i]), q[i] = from_bits(a.dtype, row.q[i]);
  }

  float kk, kq, qq, k_unit = 1.f, q_unit = 1.f;
#pragma unroll 1
  for (;;) {
    kk = kq = qq = 0.f;
#pragma unroll
    for (int i = 0; i < C::kElements; ++i) kk += k[i] * k[i], kq += k[i] * q[i], qq += q[i] * q[i];
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      kk += __shfl_xor_sync(0xffffffffu, kk, lanes);
      kq += __shfl_xor_sync(0xffffffffu, kq, lanes);
      qq += __shfl_xor_sync(0xffffffffu, qq, lanes);
    }
    const bool shorten = a.qk_l2norm || is_long_key(a.rule, kk);
    const float k_excess = shorten ? excess(kk, k_unit) : 1.f;
    const float q_excess = a.qk_l2norm ? excess(qq, q_unit) : 1.f;
    if (k_excess == 1.f && q_excess == 1.f) break;
    k_unit *= k_excess, q_unit *= q_excess;
#pragma unroll
    for (int i = 0; i < C::kElements; ++i) k[i] *= 1.f / k_excess, q[i] *= 1.f / q_excess;
  }

  const auto inverse_norm = [&](float square, float unit) {
    return a.qk_l2norm ? rsqrtf(unit == 1.f ? square + kL2Eps : square) : 1.f;
  };
  const float k_norm = inverse_norm(kk, k_unit);
  const float q_norm = inverse_norm(qq, q_unit) * a.scale;
#pragma unroll
  for (int i = 0; i < C::kElements; ++i) {
    const int row = lane + 32 * i, place = row % C::kParts * C::kRows + row / C::kParts;
    shared.k[token][place] = k[i] * k_norm;
    shared.q[token][place] = q[i] * q_norm;
  }
  const auto c =
      key_coefficients(a.rule, row.beta, kk * k_norm * k_norm, a.qk_l2norm ? 1.f : k_unit,
                       a.log_decay.data != nullptr, row.log_decay);
  const float gamma = expf(c.log_gate);
  if (lane == 0) shared.scalars[token] = {gamma, gamma * c.erase, c.write, kq * k_norm * q_norm};
}

// kVec elements of a row of the state, moved at once. Words and not elements, which the compiler
// would take apart as soon as they are loaded, and so wait for them there.
template <int kBytes>
struct Words;
template <>
struct Words<16> {
  using Type = uint4;
};
template <>
struct Words<8> {
  using Type = uint2;
};
template <>
struct Words<4> {
  using Type = uint32_t;
};
template <>
struct Words<2> {
  using Type = uint16_t;
};
template <typename State, int kVec>
using Piece = typename Words<sizeof(State) * kVec>::Type;

template <typename State, int kVec>
__device__ __forceinline__ Piece<State, kVec> load_piece(const State* from) {
  const auto* piece = reinterpret_cast<const Piece<State, kVec>*>(from);
  if constexpr (kStream) return __ldcs(piece);
  return *piece;
}

template <typename State, int kVec>
__device__ __forceinline__ void store_piece(State* to, Piece<State, kVec> x) {
  auto* piece = reinterpret_cast<Piece<State, kVec>*>(to);
  if constexpr (kStream) {
    __stcs(piece, x);
  } else {
    *piece = x;
  }
}

__device__ __forceinline__ float2 unpack_pair(__nv_bfloat16, uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
__device__ __forceinline__ float2 unpack_pair(__half, uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}
__device__ __forceinline__ uint32_t pack_pair(__nv_bfloat16, float x, float y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t pack_pair(__half, float x, float y) {
  const __half2 pair = __floats2half2_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <typename State, int kVec>
__device__ __forceinline__ void unpack(const Piece<State, kVec>& piece, float (&s)[kVec]) {
  if constexpr (sizeof(State) == 2 && kVec > 1) {
#pragma unroll
    for (int c = 0; c < kVec; c += 2) {
      const float2 pair = unpack_pair(State(), reinterpret_cast<const uint32_t*>(&piece)[c / 2]);
      s[c] = pair.x, s[c + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int c = 0; c < kVec; ++c) s[c] = to_float(reinterpret_cast<const State*>(&piece)[c]);
  }
}

template <typename State, int kVec>
__device__ __forceinline__ Piece<State, kVec> pack(const float (&s)[kVec]) {
  Piece<State, kVec> piece;
  if constexpr (sizeof(State) == 2 && kVec > 1) {
#pragma unroll
    for (int c = 0; c < kVec; c += 2) {
      reinterpret_cast<uint32_t*>(&piece)[c / 2] = pack_pair(State(), s[c], s[c + 1]);
    }
  } else {
#pragma unroll
    for (int c = 0; c < kVec; ++c) reinterpret_cast<State*>(&piece)[c] = State(s[c]);
  }
  return piece;
}

template <int kVec>
__device__ __forceinline__ void store_floats(float* to, const float (&x)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; i += 4) {
    if constexpr (kVec % 4 == 0) {
      *reinterpret_cast<float4*>(to + i) = {x[i], x[i + 1], x[i + 2], x[i + 3]};
    } else {
      to[i] = x[i];
    }
  }
}

template <int kVec>
__device__ __forceinline__ void load_floats(const float* from, float (&x)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; i += 4) {
    if constexpr (kVec % 4 == 0) {
      const float4 y = *reinterpret_cast<const float4*>(from + i);
      x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
    } else {
      x[i] = from[i];
    }
  }
}

// Part `part` of S^T k and S^T q.
template <typename C>
__device__ __forceinline__ void sum_rows(const float (&s)[C::kRows][C::kVec], int token, int part,
                                         Shared<C>& shared) {
  float sum_k[C::kVec] = {}, sum_q[C::kVec] = {};
#pragma unroll
  for (int i = 0; i < C::kRows; i += 4) {
    float k[4], q[4];
    load_floats(&shared.k[token][part * C::kRows + i], k);
    load_floats(&shared.q[token][part * C::kRows + i], q);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int c = 0; c < C::kVec; ++c) {
        sum_k[c] += s[i + j][c] * k[j];
        sum_q[c] += s[i + j][c] * q[j];
      }
    }
  }
  const int column = threadIdx.x % C::kColumnLanes * C::kVec;
  store_floats(&shared.sums[0][part][column], sum_k);
  store_floats(&shared.sums[1][part][column], sum_q);
}

template <typename State, typename C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    recurrent_kernel(const __grid_constant__ Args a) {
  __shared__ Shared<C> shared;
#if __CUDA_ARCH__ >= 900
  // Wait for what the stream holds ahead; the launch behind this one may begin to do the same.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int key_dim = C::kExact ? C::kKey : a.key_dim;
  const int hv = blockIdx.y;
  const int64_t sequence = a.first_sequence + blockIdx.z;
  const int first_column = blockIdx.x * C::kColumns;
  // The thread's part of the state: rows part + i kParts.
  const int part = warp * C::kRowLanes + lane / C::kColumnLanes;
  const int column0 = first_column + lane % C::kColumnLanes * C::kVec;
  // The first kColumns threads make u, the next ones o, of one column each.
  const bool makes_u = thread < C::kColumns, finishes = thread < 2 * C::kColumns;
  const int column = makes_u ? thread : thread - C::kColumns;
  const bool has_column = finishes && (C::kExact || first_column + column < a.value_dim);
  // Which token the warp prepares. With T = 1 it is another warp from head to head, so that the
  // work spreads over the schedulers.
  const int mine = (warp + hv) % C::kWarps;

  const int64_t slot = a.state_indices ? a.state_indices[sequence] : sequence;
  const int64_t b = a.cu_seqlens ? 0 : sequence;
  const int64_t begin = a.cu_seqlens ? a.cu_seqlens[sequence] : 0;
  const int64_t end = a.cu_seqlens ? a.cu_seqlens[sequence + 1] : a.tokens;

  Row<C::kElements> row;
  if (begin + mine < end) load_row<C>(a, b, begin + mine, hv, row);
  const auto o_index = [&](int64_t t) { return index(a.o, b, t, hv) + first_column + column; };
  if (a.state_indices && (slot < 0 || slot >= a.pool_size)) {  // padding
    for (int64_t t = begin; t < end && has_column && !makes_u; ++t) {
      store_value(a.dtype, a.o, o_index(t), 0.f);
    }
    return;
  }
  const int64_t offset = (slot * a.value_heads + hv) * key_dim * a.value_dim + column0;
  const auto inside = [&](int i) {
    return C::kExact || (part + i * C::kParts < key_dim && column0 < a.value_dim);
  };
  Piece<State, C::kVec> pieces[C::kRows];
  const State* from = static_cast<const State*>(a.state_in) + offset;
#pragma unroll
  for (int i = 0; i < C::kRows; ++i) {
    pieces[i] = a.state_in && inside(i)
                    ? load_piece<State, C::kVec>(from + int64_t{part + i * C::kParts} * a.value_dim)
                    : Piece<State, C::kVec>{};
  }
  int64_t v = index(a.v, b, begin, hv) + first_column + column;
  uint32_t next_v = has_column && makes_u && begin < end ? load_bits(a.dtype, a.v, v) : 0;

  if (begin + mine < end) prepare_token<C>(a, row, mine, shared);
  __syncthreads();

  float s[C::kRows][C::kVec];
#pragma unroll
  for (int i = 0; i < C::kRows; ++i) unpack<State>(pieces[i], s[i]);

  int token = 0;  // of those in shared memory
  for (int64_t t = begin; t < end; ++t, ++token) {
    if (token == C::kWarps) {
      __syncthreads();
      if (t + mine < end) prepare_token<C>(a, row, mine, shared);
      __syncthreads();
      token = 0;
    }
    const int64_t ahead = t + C::kWarps + mine;
    if (token == 0 && ahead < end) load_row<C>(a, b, ahead, hv, row);
    const uint32_t now_v = next_v;
    v += a.v.token;
    if (has_column && makes_u && t + 1 < end) next_v = load_bits(a.dtype, a.v, v);

    sum_rows<C>(s, token, part, shared);
    __syncthreads();
    const Scalars x = shared.scalars[token];
    float sum = 0.f;
    if (finishes) {
#pragma unroll
      for (int i = 0; i < C::kParts; ++i) sum += shared.sums[!makes_u][i][column];
      if (makes_u) shared.u[column] = x.write * from_bits(a.dtype, now_v) - x.erase * sum;
    }
    __syncthreads();
    float u[C::kVec];
    load_floats(&shared.u[lane % C::kColumnLanes * C::kVec], u);
#pragma unroll
    for (int i = 0; i < C::kRows; i += 4) {
      float k[4];
      load_floats(&shared.k[token][part * C::kRows + i], k);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int c = 0; c < C::kVec; ++c) s[i + j][c] = x.gamma * s[i + j][c] + k[j] * u[c];
      }
    }
    if (has_column && !makes_u) {
      store_value(a.dtype, a.o, o_index(t), x.gamma * sum + x.kq * shared.u[column]);
    }
  }

  if (a.state_out) {
    State* to = static_cast<State*>(a.state_out) + offset;
#pragma unroll
    for (int i = 0; i < C::kRows; ++i) {
      if (inside(i)) {
        store_piece<State, C::kVec>(to + int64_t{part + i * C::kParts} * a.value_dim,
                                    pack<State>(s[i]));
      }
    }
  }
}

}  // namespace efla::cuda::recurrent
