// Storage types and the float arithmetic on them, a few elements at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <initializer_list>

#include "efla/kernels/params.h"

namespace efla::cuda::layer {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <typename S>
__device__ __forceinline__ S from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

/// N consecutive elements of S, moved in one piece.
template <typename S, int N>
struct alignas(sizeof(S) * N) Pack {
  S x[N];
};

template <typename S, int N>
__device__ __forceinline__ void load(const S* p, float (&out)[N]) {
  const auto pack = *reinterpret_cast<const Pack<S, N>*>(p);
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = to_float(pack.x[i]);
}

template <typename S, int N>
__device__ __forceinline__ void store(S* p, const float (&in)[N]) {
  Pack<S, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.x[i] = from_float<S>(in[i]);
  *reinterpret_cast<Pack<S, N>*>(p) = pack;
}

/// Elements of S in 16 bytes.
template <typename S>
inline constexpr int kPackSize = 16 / static_cast<int>(sizeof(S));

/// Whether packs of 16 bytes may be loaded from every one of the pointers (null ones do not count).
inline bool aligned(std::initializer_list<const void*> pointers) {
  for (const void* p : pointers) {
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return false;
  }
  return true;
}

/// 0 for very negative z, where e^-z overflows.
__device__ __forceinline__ float sigmoid(float z) { return 1.0f / (1.0f + expf(-z)); }
__device__ __forceinline__ float silu(float z) { return z * sigmoid(z); }
__device__ __forceinline__ float silu_derivative(float z) {
  const float s = sigmoid(z);
  return s * (1.0f + z * (1.0f - s));
}

/// Calls f(S{}) with the storage type of `dtype` and returns its result.
template <typename F>
cudaError_t dispatch_storage(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float{});
    case DType::kBFloat16:
      return f(__nv_bfloat16{});
    case DType::kFloat16:
      return f(__half{});
    case DType::kFloat64:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace efla::cuda::layer
