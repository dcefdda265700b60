// What the portable chunk kernels share: their arguments, where a chunk lies, and tile copies.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "efla/kernels/cuda/portable/half_range.cuh"
#include "efla/kernels/params.h"

namespace efla::cuda {

// Per-token scalars that `prepare` leaves for the scans, each a row of C floats per chunk and head.
// They are those of the normalised keys k_hat = k / |k| with erase e_hat = e |k|^2 and write w_hat
// = w |k|, folded so that the scans multiply the keys as stored (docs/kernels.md, "Normalised
// keys"). Stored means: long keys, and with l2 normalisation long queries, over a power of two
// (long_key.h).
enum ScalarRow : int {
  kEraseIn = 0,  // e_hat Gamma / |k|: multiplies K S
  kWrite,        // w |k|: multiplies V
  kQueryGate,    // scale Gamma, over kQueryOut: multiplies Q S
  kKeyOut,       // exp(G_C - G) / |k|: multiplies U in the state update
  kChunkGate,    // element 0: Gamma_C; 1: power of two by which A_hat is stored too small; 2: not 0
                 // if a row of the chunk is long
  kQueryOut,     // power of two by which P_hat is stored too small: multiplies (Q S + P U)
  kScanRows,     // the scans load the rows above; those below they read where a row is long
  kKeyUnit = kScanRows,  // the power of two of each key
  kQueryUnit,
  kScalarRows,
  // On Hopper, in the place of kKeyUnit and kQueryUnit, for its backward: |k|^2 and, with l2
  // normalisation, |q|^2 as stored.
  kKeySquare = kKeyUnit,
  kQuerySquare = kQueryUnit
};

// Arguments of the chunk kernels, by value. Workspaces are indexed by chunk slot (`locate`).
struct ChunkArgs {
  View q, k, v, beta, log_decay;
  MutableView o;
  const float* initial_state;    // [N, HV, K, V]; null: zero
  float* final_state;            // null: not wanted
  const int64_t* cu_seqlens;     // device; null: dense
  const int64_t* longest_first;  // [N] numbers of packed sequences; null: as they lie
  int64_t sequences, tokens;
  int heads, value_heads, key_dim, value_dim;
  float scale;
  Rule rule;
  bool qk_l2norm;
  bool vector_q, vector_k, vector_v;  // rows may be read 16 bytes at a time
  // Lower triangles; blocks of 16 x 16 above the diagonal are neither written nor read.
  void* inverse;   // A_hat = (I + L_hat)^-1, [slots, HV, C, C], Square<T>
  void* scores;    // P_hat, [slots, HV, C, C], Square<T>
  float* scalars;  // [slots, HV, kScalarRows, C]

  // Backward only, but for `columns` on Hopper: V rounded up to whole tiles. The matrices over it
  // are zero beyond V and beyond K as far as anyone reads them.
  View grad_o;
  bool vector_grad_o;
  const float* grad_final_state;  // [N, HV, K, V]; null: zero
  float* grad_initial_state;      // null: not wanted
  MutableView grad_q, grad_k;     // [B, T, H, K] storage type, or with grouped heads float parts
  MutableView grad_v;             // [B, T, HV, V]
  MutableView grad_beta, grad_log_decay;
  int64_t columns;
  void* states;       // S^T before each chunk, [slots, HV, columns, Kpad], storage type
  void* grad_states;  // dS^T after each chunk, likewise
  void* u;            // U_hat, [slots, HV, C, columns], storage type
  void* grad_r;       // dR_hat, likewise
};

// Columns of K, padded to kK, that the kernels of 16-bit tensors look at: all, or all but the last
// 32. (They must not ask for more: a state is not written there.)
template <int kK>
__device__ __forceinline__ int used_keys(const ChunkArgs& a) {
  return kK <= 128 && a.key_dim <= kK - 32 ? kK - 32 : kK;
}

// Where one chunk lies in the batch.
struct Chunk {
  int64_t sequence;  // -1: the slot is unused
  int64_t row;       // b of the tensors
  int64_t begin;     // first token
  int tokens;        // 1 .. C
};

// Slots: dense, ceil(T / C) per sequence; packed, sequence n starts at slot n + cu_seqlens[n] / C,
// which needs no look at the other sequences and never overlaps the next.
__host__ __device__ inline int64_t chunk_slots(int64_t sequences, int64_t tokens, bool packed,
                                               int chunk) {
  const int64_t per = (tokens + chunk - 1) / chunk;
  return packed ? per + sequences : sequences * per;
}

__device__ inline int64_t first_slot(const ChunkArgs& a, int64_t sequence, int chunk) {
  if (a.cu_seqlens) return sequence + a.cu_seqlens[sequence] / chunk;
  return sequence * ((a.tokens + chunk - 1) / chunk);
}

__device__ inline Chunk locate(const ChunkArgs& a, int64_t slot, int chunk) {
  if (!a.cu_seqlens) {
    const int64_t per = (a.tokens + chunk - 1) / chunk;
    const int64_t begin = slot % per * chunk;
    return {slot / per, slot / per, begin, static_cast<int>(min(int64_t{chunk}, a.tokens - begin))};
  }
  int64_t low = 0, high = a.sequences;  // the last sequence whose first slot is <= slot
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (first_slot(a, middle, chunk) <= slot ? low : high) = middle;
  }
  const int64_t begin = a.cu_seqlens[low] + (slot - first_slot(a, low, chunk)) * chunk;
  const int64_t left = a.cu_seqlens[low + 1] - begin;
  if (slot < first_slot(a, low, chunk) || left <= 0) return {-1, 0, 0, 0};
  return {low, 0, begin, static_cast<int>(min(int64_t{chunk}, left))};
}

__device__ __forceinline__ void copy_async_16(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Starts copying `rows` x `columns` elements (row stride `stride`) into a tile of kRows x kColumns,
// zero elsewhere. Whole blocks call it; commit_copies() and wait_copies() finish it.
template <int kRows, int kColumns, typename T>
__device__ __forceinline__ void load_tile(T* tile, int pitch, const T* source, int64_t stride,
                                          int rows, int columns, bool vector) {
  if (vector) {
    constexpr int kPer = 16 / sizeof(T);
    constexpr int kPieces = kColumns / kPer;
    for (int i = threadIdx.x; i < kRows * kPieces; i += blockDim.x) {
      const int r = i / kPieces, c = i % kPieces * kPer;
      const bool valid = r < rows && c < columns;
      copy_async_16(tile + r * pitch + c, valid ? source + r * stride + c : source, valid);
    }
  } else {
    for (int i = threadIdx.x; i < kRows * kColumns; i += blockDim.x) {
      const int r = i / kColumns, c = i % kColumns;
      tile[r * pitch + c] = r < rows && c < columns ? source[r * stride + c] : T(0.f);
    }
  }
}

template <typename T>
__device__ __forceinline__ const T* element(const View& x, int64_t b, int64_t t, int64_t h) {
  return static_cast<const T*>(x.data) + b * x.batch + t * x.token + h * x.head;
}

template <typename T>
__device__ __forceinline__ void store_pair(T* target, float x, float y) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float2*>(target) = make_float2(x, y);
  } else {
    *reinterpret_cast<uint32_t*>(target) = pack<T>(x, y);
  }
}

}  // namespace efla::cuda
