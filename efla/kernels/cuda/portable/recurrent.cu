// The recurrence token by token, and with T = 1 the decode step: bound by one read and one write of
// the state.
//
// One block of kWarps warps owns a tile of state columns [K, kVec * 8] in registers for the whole
// sequence. Lane l of warp w holds columns kVec * (l % 8) .. and rows i * 4 kWarps + 4 w + l / 8,
// so a warp reads four row segments of 128 bytes at a time (kVec = 4). Per token one pass makes the
// partial sums of S^T k, S^T q, k.k, k.q and q.q; one exchange through shared memory finishes them;
// then, with gamma = e^g and u = w v - gamma e S^T k (docs/mathematics.md, "One step in one pass"),
//
//   S <- gamma S + k u^T ,     o = scale (gamma S_old^T q + (k.q) u) .
//
// kRows * 4 kWarps >= K; rows beyond K are zero. A step's state may be stored in 16 bits: half the
// bytes to move, rounded once a call.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "efla/flow/long_key.h"
#include "efla/kernels/cuda/delta_rule.h"

namespace efla::cuda {
namespace {

constexpr int kColumnLanes = 8;
constexpr int kRowLanes = 32 / kColumnLanes;  // rows that a warp reads at a time
constexpr int kMaxKeyDim = 512;
constexpr float kL2Eps = 1e-6f;

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
  int heads, value_heads, key_dim, value_dim;
  int column_tiles;
  float scale;
  Rule rule;
  bool qk_l2norm;
};

template <typename T>
__device__ __forceinline__ float to_float(T x) {
  return static_cast<float>(x);
}

template <typename T>
__device__ __forceinline__ const T* at(const View& view, int64_t b, int64_t t, int64_t h) {
  return static_cast<const T*>(view.data) + b * view.batch + t * view.token + h * view.head;
}

// What one token brings, loaded one token ahead.
template <int kRows, int kVec>
struct Token {
  float k[kRows];
  float q[kRows];
  float v[kVec];
  float beta;
  float log_decay;
};

// What one thread works on: elements of a row b of the tensors and of a value head.
struct Place {
  int64_t b;
  int hv;
  int row0, column0;  // the first
  bool padding;
};

template <typename T, int kRows, int kVec, int kRowStride, bool kExact>
__device__ __forceinline__ void load_token(const Args& a, const Place& p, int64_t t,
                                           Token<kRows, kVec>& token) {
  const int64_t b = p.b;
  const int hv = p.hv, row0 = p.row0, column0 = p.column0;
  const int hk = hv / (a.value_heads / a.heads);
  const T* k = at<T>(a.k, b, t, hk);
  const T* q = at<T>(a.q, b, t, hk);
  const T* v = at<T>(a.v, b, t, hv);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = row0 + i * kRowStride;
    token.k[i] = kExact || row < a.key_dim ? to_float(k[row]) : 0.f;
    token.q[i] = kExact || row < a.key_dim ? to_float(q[row]) : 0.f;
  }
#pragma unroll
  for (int c = 0; c < kVec; ++c) {
    token.v[c] = kExact || column0 + c < a.value_dim ? to_float(v[column0 + c]) : 0.f;
  }
  token.beta = *at<float>(a.beta, b, t, hv);
  token.log_decay = a.log_decay.data ? *at<float>(a.log_decay, b, t, hv) : 0.f;
}

// Four elements of a state, moved at once.
template <typename State>
using Quad = std::conditional_t<sizeof(State) == 4, float4, uint2>;

template <int kVec, typename State>
__device__ __forceinline__ void load_state(const State* row, int column0, int value_dim,
                                           float (&s)[kVec]) {
  if (column0 >= value_dim) return;
  if constexpr (kVec == 4) {
    const auto quad = *reinterpret_cast<const Quad<State>*>(row + column0);
#pragma unroll
    for (int c = 0; c < 4; ++c) s[c] = to_float(reinterpret_cast<const State*>(&quad)[c]);
  } else {
    s[0] = to_float(row[column0]);
  }
}

template <int kVec, typename State>
__device__ __forceinline__ void store_state(State* row, int column0, int value_dim,
                                            const float (&s)[kVec]) {
  if (column0 >= value_dim) return;
  if constexpr (kVec == 4) {
    Quad<State> quad;
#pragma unroll
    for (int c = 0; c < 4; ++c) reinterpret_cast<State*>(&quad)[c] = State(s[c]);
    *reinterpret_cast<Quad<State>*>(row + column0) = quad;
  } else {
    row[column0] = State(s[0]);
  }
}

template <int kVec>
inline constexpr int kSums = 2 * kVec + 3;  // S^T k and S^T q per column, then k.k, k.q, q.q

// Two buffers for the warps' parts of the sums, so that one barrier per turn is enough.
template <int kWarps, int kVec>
struct Exchange {
  float sums[2][kWarps][kColumnLanes][kSums<kVec>];
};

// The sums of a token over all rows. Called by the whole block; `turn` counts the calls.
template <int kRows, int kWarps, int kVec>
__device__ __forceinline__ void sum_token(const float (&s)[kRows][kVec],
                                          const Token<kRows, kVec>& now,
                                          Exchange<kWarps, kVec>& exchange, int64_t turn,
                                          float (&sum)[kSums<kVec>]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column_lane = lane % kColumnLanes;
#pragma unroll
  for (int j = 0; j < kSums<kVec>; ++j) sum[j] = 0.f;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int c = 0; c < kVec; ++c) {
      sum[c] += s[i][c] * now.k[i];
      sum[kVec + c] += s[i][c] * now.q[i];
    }
    sum[2 * kVec] += now.k[i] * now.k[i];
    sum[2 * kVec + 1] += now.k[i] * now.q[i];
    sum[2 * kVec + 2] += now.q[i] * now.q[i];
  }
#pragma unroll
  for (int j = 0; j < kSums<kVec>; ++j) {
    sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], 8);
    sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], 16);
  }
  auto& buffer = exchange.sums[turn & 1];
  if (lane < kColumnLanes) {
#pragma unroll
    for (int j = 0; j < kSums<kVec>; ++j) buffer[warp][column_lane][j] = sum[j];
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kSums<kVec>; ++j) {
    sum[j] = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum[j] += buffer[w][column_lane][j];
  }
}

// What a token needs beside its rows once they may have been divided (long_key.h).
struct Units {
  float k = 1.f, q = 1.f;
};

// The state after token t and its output, from its sums.
template <typename T, int kRows, int kVec>
__device__ __forceinline__ void finish_token(const Args& a, const Place& p, int64_t t,
                                             const Token<kRows, kVec>& now,
                                             const float (&sum)[kSums<kVec>], Units units,
                                             float (&s)[kRows][kVec]) {
  const auto inverse_norm = [&](float square, float unit) {
    return a.qk_l2norm ? rsqrtf(unit == 1.f ? square + kL2Eps : square) : 1.f;
  };
  const float k_norm = inverse_norm(sum[2 * kVec], units.k);
  const float q_norm = inverse_norm(sum[2 * kVec + 2], units.q) * a.scale;
  const float lambda = sum[2 * kVec] * k_norm * k_norm;
  const auto c = key_coefficients(a.rule, now.beta, lambda, a.qk_l2norm ? 1.f : units.k,
                                  a.log_decay.data != nullptr, now.log_decay);
  const float gamma = expf(c.log_gate);
  const float kq = sum[2 * kVec + 1] * k_norm * q_norm;

  float out[kVec], u[kVec];
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    u[j] = c.write * now.v[j] - gamma * c.erase * (sum[j] * k_norm);
    out[j] = gamma * (sum[kVec + j] * q_norm) + kq * u[j];
    u[j] *= k_norm;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) s[i][j] = gamma * s[i][j] + now.k[i] * u[j];
  }
  if (p.row0 == 0) {
    T* o = static_cast<T*>(a.o.data) + p.b * a.o.batch + t * a.o.token + p.hv * a.o.head;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      if (p.column0 + j < a.value_dim) o[p.column0 + j] = T(p.padding ? 0.f : out[j]);
    }
  }
}

// Whether token t has a row that is too long: the same for all threads of the block, as the sums.
template <int kVec>
__device__ __forceinline__ bool has_long_row(const Args& a, const float (&sum)[kSums<kVec>]) {
  if (a.qk_l2norm) return is_long(sum[2 * kVec]) || is_long(sum[2 * kVec + 2]);
  return is_long_key(a.rule, sum[2 * kVec]);
}

// What a row must be divided by beside `unit`, a power of two near its length; 1: nothing, it is
// not long. An infinite square takes two turns, the second of which has a finite one; a third would
// mean that the row itself is infinite.
__device__ __forceinline__ float excess(float square, float unit) {
  if (!is_long(square)) return 1.f;
  if (square > FLT_MAX) return unit > 1.f ? 1.f : 0x1p80f;
  return fminf(unit_of(sqrtf(square)), 0x1p126f / unit);
}

// A token with a long row, after its first sums. Apart from the loop and with the state in local
// memory, so that what hardly ever runs takes none of its registers. Returns the next turn.
template <typename T, int kRows, int kWarps, int kVec, bool kExact>
__device__ __noinline__ int64_t long_token(const Args& a, const Place& p, int64_t t,
                                           Exchange<kWarps, kVec>& exchange, int64_t turn,
                                           float (&sum)[kSums<kVec>], float (&s)[kRows][kVec]) {
  Units units;
  Token<kRows, kVec> now;
  load_token<T, kRows, kVec, kWarps * kRowLanes, kExact>(a, p, t, now);
  for (;;) {
    const bool shorten_k = a.qk_l2norm || is_long_key(a.rule, sum[2 * kVec]);
    const float k = shorten_k ? excess(sum[2 * kVec], units.k) : 1.f;
    const float q = a.qk_l2norm ? excess(sum[2 * kVec + 2], units.q) : 1.f;
    if (k == 1.f && q == 1.f) break;
    units.k *= k, units.q *= q;
#pragma unroll
    for (int i = 0; i < kRows; ++i) now.k[i] *= 1.f / k, now.q[i] *= 1.f / q;
    sum_token(s, now, exchange, turn++, sum);
  }
  finish_token<T>(a, p, t, now, sum, units, s);
  return turn;
}

template <typename T, typename State, int kRows, int kWarps, int kVec, bool kExact>
__global__ void __launch_bounds__(kWarps * 32) recurrent_kernel(const __grid_constant__ Args a) {
  constexpr int kRowStride = kWarps * kRowLanes;
  __shared__ Exchange<kWarps, kVec> exchange;

  const int64_t sequence = blockIdx.x / (a.value_heads * a.column_tiles);
  const int hv = (blockIdx.x / a.column_tiles) % a.value_heads;
  const int tile = blockIdx.x % a.column_tiles;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column_lane = lane % kColumnLanes;
  const int row0 = warp * kRowLanes + lane / kColumnLanes;
  const int column0 = (tile * kColumnLanes + column_lane) * kVec;

  const int64_t b = a.cu_seqlens ? 0 : sequence;
  const int64_t begin = a.cu_seqlens ? a.cu_seqlens[sequence] : 0;
  const int64_t end = a.cu_seqlens ? a.cu_seqlens[sequence + 1] : a.tokens;
  const int64_t slot = a.state_indices ? a.state_indices[sequence] : sequence;
  const bool padding = a.state_indices && (slot < 0 || slot >= a.pool_size);
  const int64_t state_offset = (slot * a.value_heads + hv) * a.key_dim * int64_t{a.value_dim};
  const Place place{b, hv, row0, column0, padding};

  float s[kRows][kVec] = {};
  if (a.state_in && !padding) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = row0 + i * kRowStride;
      if (kExact || row < a.key_dim) {
        load_state(
            static_cast<const State*>(a.state_in) + state_offset + int64_t{row} * a.value_dim,
            column0, a.value_dim, s[i]);
      }
    }
  }

  Token<kRows, kVec> next;
  if (begin < end) load_token<T, kRows, kVec, kRowStride, kExact>(a, place, begin, next);
  int64_t turn = 0;
  for (int64_t t = begin; t < end; ++t) {
    const Token<kRows, kVec> now = next;
    if (t + 1 < end) load_token<T, kRows, kVec, kRowStride, kExact>(a, place, t + 1, next);

    float sum[kSums<kVec>];
    sum_token(s, now, exchange, turn++, sum);
    if (__builtin_expect(has_long_row<kVec>(a, sum), 0)) {
      float state[kRows][kVec], sums[kSums<kVec>];
      memcpy(state, s, sizeof(s));
      memcpy(sums, sum, sizeof(sum));
      turn = long_token<T, kRows, kWarps, kVec, kExact>(a, place, t, exchange, turn, sums, state);
      memcpy(s, state, sizeof(s));
    } else {
      finish_token<T>(a, place, t, now, sum, {}, s);
    }
  }

  if (a.state_out && !padding) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = row0 + i * kRowStride;
      if (kExact || row < a.key_dim) {
        store_state(static_cast<State*>(a.state_out) + state_offset + int64_t{row} * a.value_dim,
                    column0, a.value_dim, s[i]);
      }
    }
  }
}

template <typename T, typename State, int kVec>
cudaError_t launch(const Args& a, int64_t sequences, cudaStream_t stream) {
  const int64_t blocks = sequences * a.value_heads * a.column_tiles;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX || a.key_dim > kMaxKeyDim) return cudaErrorInvalidValue;
  const auto grid = static_cast<unsigned>(blocks);
  if constexpr (kVec == 4) {  // decoding's usual sizes, without a bound to check
    if (a.value_dim % (kVec * kColumnLanes) == 0 && (a.key_dim == 64 || a.key_dim == 128)) {
      a.key_dim == 64 ? recurrent_kernel<T, State, 4, 4, kVec, true><<<grid, 128, 0, stream>>>(a)
                      : recurrent_kernel<T, State, 8, 4, kVec, true><<<grid, 128, 0, stream>>>(a);
      return cudaGetLastError();
    }
  }
  if (a.key_dim <= 128) {
    recurrent_kernel<T, State, 8, 4, kVec, false><<<grid, 128, 0, stream>>>(a);
  } else if (a.key_dim <= 256) {
    recurrent_kernel<T, State, 8, 8, kVec, false><<<grid, 256, 0, stream>>>(a);
  } else {
    recurrent_kernel<T, State, 16, 8, kVec, false><<<grid, 256, 0, stream>>>(a);
  }
  return cudaGetLastError();
}

template <typename T, typename State>
cudaError_t run(Args a, int64_t sequences, cudaStream_t stream) {
  constexpr uintptr_t kAlignment = sizeof(Quad<State>);
  const bool vector = a.value_dim % 4 == 0 &&
                      reinterpret_cast<uintptr_t>(a.state_in) % kAlignment == 0 &&
                      reinterpret_cast<uintptr_t>(a.state_out) % kAlignment == 0;
  const int columns = kColumnLanes * (vector ? 4 : 1);
  a.column_tiles = (a.value_dim + columns - 1) / columns;
  return vector ? launch<T, State, 4>(a, sequences, stream)
                : launch<T, State, 1>(a, sequences, stream);
}

template <typename State>
cudaError_t dispatch(const Problem& p, Args a, cudaStream_t stream) {
  a.q = p.q, a.k = p.k, a.v = p.v, a.beta = p.beta, a.log_decay = p.log_decay;
  a.tokens = p.shape.tokens;
  a.heads = static_cast<int>(p.shape.heads);
  a.value_heads = static_cast<int>(p.shape.value_heads);
  a.key_dim = static_cast<int>(p.shape.key_dim);
  a.value_dim = static_cast<int>(p.shape.value_dim);
  a.scale = static_cast<float>(p.scale);
  a.rule = p.rule;
  a.qk_l2norm = p.qk_l2norm;
  switch (p.dtype) {
    case DType::kFloat32:
      return run<float, State>(a, p.shape.sequences, stream);
    case DType::kBFloat16:
      return run<__nv_bfloat16, State>(a, p.shape.sequences, stream);
    case DType::kFloat16:
      return run<__half, State>(a, p.shape.sequences, stream);
    case DType::kFloat64:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t recurrent_forward(const ForwardParams& params, cudaStream_t stream) {
  if (params.checkpoints) return cudaErrorInvalidValue;
  Args a{};
  a.o = params.o;
  a.state_in = params.problem.initial_state;
  a.state_out = params.final_state;
  a.cu_seqlens = params.problem.cu_seqlens;
  const Problem& p = params.problem;
  if (auto e = zero_slack(p, params.o, p.shape.value_heads, p.shape.value_dim,
                          p.dtype == DType::kFloat32 ? 4 : 2, stream)) {
    return e;
  }
  return dispatch<float>(params.problem, a, stream);
}

cudaError_t step(const StepParams& params, cudaStream_t stream) {
  Args a{};
  a.o = params.o;
  a.state_in = a.state_out = params.state;
  a.state_indices = params.state_indices;
  a.pool_size = params.pool_size;
  switch (params.state_dtype.value_or(DType::kFloat32)) {
    case DType::kFloat32:
      return dispatch<float>(params.problem, a, stream);
    case DType::kBFloat16:
      return dispatch<__nv_bfloat16>(params.problem, a, stream);
    case DType::kFloat16:
      return dispatch<__half>(params.problem, a, stream);
    case DType::kFloat64:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace efla::cuda
