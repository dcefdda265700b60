// What a block of chunk_gradients.cuh keeps in shared memory.
#pragma once

#include "efla/kernels/cuda/portable/chunk_scalars.cuh"
#include "efla/kernels/cuda/portable/chunk_tiles.cuh"

namespace efla::cuda {

// 16 warps of up to 128 registers fill a multiprocessor's register file: one block, or where Z, Y
// and X are small two, which wait at different times.
template <int kK, int kC>
inline constexpr int kGradientThreads = kC == 64 && kK > 64 ? 512 : 256;
template <int kK, int kC>
inline constexpr int kGradientBlocks = kC == 64 && kK == 64 ? 2 : 1;
inline constexpr int kGradientColumns = 32;  // of V, at a time

template <typename T, int kK, int kC>
struct GradientShared {
  static constexpr int kRowWarps = kC / 16;
  static constexpr int kColumnWarps = kGradientThreads<kK, kC> / 32 / kRowWarps;
  static constexpr int kPitch = kK + kTilePad;
  static constexpr int kValuePitch = kGradientColumns + kTilePad;
  static constexpr int kPairPitch = kC + kTilePad;
  // Registers hold Z, Y and X [kC, kK] but for kC = 64 and kK = 256: there V passes twice, once for
  // each half of K.
  static constexpr int kPasses = kC == 64 && kK == 256 ? 2 : 1;
  static constexpr int kPassColumns = kK / kPasses;
  static constexpr int kStatePitch = kPassColumns + kTilePad;
  static constexpr int kStages = sizeof(T) == 2 && (kK <= 128 || kC == 64) ? 2 : 1;  // what fits

  struct Values {  // one tile of V
    T u[kC * kValuePitch], r[kC * kValuePitch], grad_o[kC * kValuePitch], v[kC * kValuePitch];
    T state[kGradientColumns * kStatePitch];  // transposed, as is
    T grad_state[kGradientColumns * kStatePitch];
  };

  struct Pairs {
    T symmetric[kC * kPairPitch];   // (B + B^T), columns scaled for K as stored
    T query_side[kC * kPairPitch];  // scale (D o dP), columns scaled for K as stored
    T key_side[kC * kPairPitch];    // scale (D o dP), rows scaled for Q as stored
  };
  union InTurn {  // the pairs are made when the last tile has been read
    Values values[kStages];
    Pairs pairs;
  };
  struct Apart {  // or between two passes
    Values values[kStages];
    Pairs pairs;
  };

  T k[kC * kPitch], q[kC * kPitch];
  std::conditional_t<kPasses == 1, InTurn, Apart> tiles;
  float most[2][kGradientThreads<kK, kC> / 32];  // the largest elements of the pairs, by warp
  TokenScalars<kC, Gate<T>> scalars;
  float dot[3][kColumnWarps][kC];                  // Z.k, Y.q, X.k; later q.dq, k.dk
  float row_sum[kColumnWarps][kC];                 // of this warp's share of [dL | dP]
  float column_sum[2][kRowWarps][kC];              // of B o KK^T and of scale D o dP o QK^T
  float state_dot[kGradientThreads<kK, kC> / 32];  // parts of <S0, dS>
  float write_dot[kC];                             // dR.v
  float grad_gate[kC], out_dot[kC];                // dG; X_t
  float z_factor[kC], x_factor[kC], y_factor[kC], k_factor[kC];
  alignas(8) float out_norm[kC];  // 1 / norm
  bool vector_grad_v;             // rows of dV may be written in pieces
};

// One of two operands, in registers.
template <typename T>
__device__ __forceinline__ AFragment<T> choose(bool first, const AFragment<T>& x,
                                               const AFragment<T>& y) {
  AFragment<T> chosen;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(x.x) / 4); ++i) chosen.x[i] = first ? x.x[i] : y.x[i];
  return chosen;
}

// Sums over the four lanes that share a row of a C fragment.
__device__ __forceinline__ float sum_row(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
// Sums over the eight lanes that share a column.
__device__ __forceinline__ float sum_column(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 4);
  x += __shfl_xor_sync(0xffffffffu, x, 8);
  return x + __shfl_xor_sync(0xffffffffu, x, 16);
}

}  // namespace efla::cuda
