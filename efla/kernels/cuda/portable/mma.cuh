// Warp-level matrix products for sm_80 and newer, one interface for bfloat16, half and float.
//
// Fragments of a 16 x 16 A, a 16 x 8 B and a 16 x 8 C (g = lane / 4, t = lane % 4), in this order:
//   A: (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1) (g, 2t+8) (g, 2t+9) (g+8, 2t+8) (g+8, 2t+9)
//   B: (2t, g) (2t+1, g) (2t+8, g) (2t+9, g)
//   C: (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1)
// so two neighbouring C tiles are an A without any exchange between lanes: that is what keeps the
// state and the chunk's intermediates in registers. For 16-bit types this is the hardware's own
// m16n8k16 layout. For float the products are TF32 x 3 (each operand split into a TF32 head and
// tail, tail x tail dropped): relative error about 1e-6. The sum over k is free to be permuted,
// which is how the same layout serves the m16n8k8 TF32 instruction.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace efla::cuda {

template <typename T>
struct AFragment {
  uint32_t x[4];
};
template <typename T>
struct BFragment {
  uint32_t x[2];
};
template <>
struct AFragment<float> {
  float x[8];
};
template <>
struct BFragment<float> {
  float x[4];
};
using CFragment = float[4];

// Rounds two floats to T and packs them, the first in the low half. By asm: what the types' own
// functions return nvcc splits into halves, which it keeps in two registers across a loop.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Two C tiles side by side, [16, 8 | 8], as an A.
template <typename T>
__device__ __forceinline__ AFragment<T> as_a(const CFragment& left, const CFragment& right) {
  if constexpr (sizeof(T) == 4) {
    return {{left[0], left[1], left[2], left[3], right[0], right[1], right[2], right[3]}};
  } else {
    return {{pack<T>(left[0], left[1]), pack<T>(left[2], left[3]), pack<T>(right[0], right[1]),
             pack<T>(right[2], right[3])}};
  }
}

// Shared-memory tiles are row-major with this many elements of padding per row: 16-byte rows for
// ldmatrix stay aligned and neighbouring rows fall into different banks.
inline constexpr int kTilePad = 8;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

template <bool kTranspose>
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  const uint32_t address = shared_address(row);
  if constexpr (kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  }
}

// A[m, k] at tile[m0 + m][k0 + k].
template <typename T>
__device__ __forceinline__ AFragment<T> load_a(const T* tile, int pitch, int m0, int k0) {
  const int lane = threadIdx.x % 32;
  AFragment<T> a;
  if constexpr (sizeof(T) == 4) {
    const T* p = tile + (m0 + lane / 4) * pitch + k0 + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) a.x[i] = p[(i / 2 % 2) * 8 * pitch + (i / 4) * 8 + i % 2];
  } else {
    ldmatrix_x4<false>(a.x, tile + (m0 + lane % 16) * pitch + k0 + lane / 16 * 8);
  }
  return a;
}

// A[m, k] at tile[k0 + k][m0 + m].
template <typename T>
__device__ __forceinline__ AFragment<T> load_a_transposed(const T* tile, int pitch, int m0,
                                                          int k0) {
  const int lane = threadIdx.x % 32;
  AFragment<T> a;
  if constexpr (sizeof(T) == 4) {
    const T* p = tile + (k0 + 2 * (lane % 4)) * pitch + m0 + lane / 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) a.x[i] = p[((i / 4) * 8 + i % 2) * pitch + (i / 2 % 2) * 8];
  } else {
    // Matrices in the order (k 0-7, m 0-7), (k 0-7, m 8-15), (k 8-15, m 0-7), (k 8-15, m 8-15).
    ldmatrix_x4<true>(a.x, tile + (k0 + lane % 8 + lane / 16 * 8) * pitch + m0 + lane / 8 % 2 * 8);
  }
  return a;
}

// Two B fragments, columns n0..n0+7 and n0+8..n0+15: B[k, n] at tile[n0 + n][k0 + k].
template <typename T>
__device__ __forceinline__ void load_b_transposed(BFragment<T> (&b)[2], const T* tile, int pitch,
                                                  int k0, int n0) {
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const T* p = tile + (n0 + 8 * j + lane / 4) * pitch + k0 + 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) b[j].x[i] = p[(i / 2) * 8 + i % 2];
    }
  } else {
    uint32_t r[4];
    ldmatrix_x4<false>(r, tile + (n0 + lane % 8 + lane / 16 * 8) * pitch + k0 + lane / 8 % 2 * 8);
    b[0].x[0] = r[0], b[0].x[1] = r[1], b[1].x[0] = r[2], b[1].x[1] = r[3];
  }
}

// The same with B[k, n] at tile[k0 + k][n0 + n].
template <typename T>
__device__ __forceinline__ void load_b(BFragment<T> (&b)[2], const T* tile, int pitch, int k0,
                                       int n0) {
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const T* p = tile + (k0 + 2 * (lane % 4)) * pitch + n0 + 8 * j + lane / 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) b[j].x[i] = p[((i / 2) * 8 + i % 2) * pitch];
    }
  } else {
    uint32_t r[4];
    ldmatrix_x4<true>(r, tile + (k0 + lane % 16) * pitch + n0 + lane / 16 * 8);
    b[0].x[0] = r[0], b[0].x[1] = r[1], b[1].x[0] = r[2], b[1].x[1] = r[3];
  }
}

// To the nearest, as cvt.rna does with five instructions. (A NaN may become a zero: what is left of
// it is a NaN all the same.)
__device__ __forceinline__ uint32_t to_tf32(float x) {
  return (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
}

__device__ __forceinline__ void mma_tf32(CFragment& c, const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// C += A B.
template <typename T>
__device__ __forceinline__ void mma(CFragment& c, const AFragment<T>& a, const BFragment<T>& b);

template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(CFragment& c, const AFragment<__nv_bfloat16>& a,
                                                   const BFragment<__nv_bfloat16>& b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]));
}

template <>
__device__ __forceinline__ void mma<__half>(CFragment& c, const AFragment<__half>& a,
                                            const BFragment<__half>& b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]));
}

template <>
__device__ __forceinline__ void mma<float>(CFragment& c, const AFragment<float>& a,
                                           const BFragment<float>& b) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // k = (2t, 2t+1) of the fragment plays the instruction's k = (t, t+4).
    const float av[4] = {a.x[4 * half], a.x[4 * half + 2], a.x[4 * half + 1], a.x[4 * half + 3]};
    const float bv[2] = {b.x[2 * half], b.x[2 * half + 1]};
    uint32_t a_head[4], a_tail[4], b_head[2], b_tail[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a_head[i] = to_tf32(av[i]);
      a_tail[i] = __float_as_uint(av[i] - __uint_as_float(a_head[i]));  // cut by the product
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      b_head[i] = to_tf32(bv[i]);
      b_tail[i] = __float_as_uint(bv[i] - __uint_as_float(b_head[i]));
    }
    mma_tf32(c, a_tail, b_head);
    mma_tf32(c, a_head, b_tail);
    mma_tf32(c, a_head, b_head);
  }
}

}  // namespace efla::cuda
