// Tensor maps for the copy engine, made on the host for every call: the driver's encoder takes a
// microsecond.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "efla/kernels/cuda/sm90/chunk.cuh"

namespace efla::cuda::sm90 {

inline int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  return cudaDeviceGetAttribute(&value, which, device) == cudaSuccess ? value : 0;
}

inline int64_t processors() { return std::max(1, attribute(cudaDevAttrMultiProcessorCount)); }

// Whether the copy engine can read or write the tensor in place: 16-byte rows, positive strides.
template <typename AnyView>
bool has_map(const AnyView& x, int64_t batch, int64_t tokens, int64_t heads) {
  const auto good = [](int64_t size, int64_t stride) {
    return size <= 1 || (stride > 0 && stride % 8 == 0 && stride < (int64_t{1} << 38));
  };
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && good(batch, x.batch) &&
         good(tokens, x.token) && good(heads, x.head);
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

// The driver's encoder; null where the driver has none.
inline Encode encoder() {
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    const auto e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                    cudaEnableDefault, &found);
    return e == cudaSuccess && found == cudaDriverEntryPointSuccess
               ? reinterpret_cast<Encode>(entry)
               : nullptr;
  }();
  return encode;
}

// Gives the thread the current device's context, which the encoder asks for. A thread has it from
// its first runtime call that needs one; torch's backward may come here on a thread without such a
// call, when all its memory is cached, and torch's device guards make none.
inline bool bind_context() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess;
}

// Boxes of kC tokens x 64 columns of one head over [batch, tokens, heads, columns].
template <typename AnyView>
bool make_map(CUtensorMap& map, const AnyView& x, DType dtype, int64_t batch, int64_t tokens,
              int64_t heads, int64_t columns) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(heads),
                              static_cast<cuuint64_t>(tokens), static_cast<cuuint64_t>(batch)};
  // The stride of a dimension of size 1 is never used but must look like one.
  const auto bytes = [](int64_t size, int64_t stride) {
    return static_cast<cuuint64_t>(size > 1 ? stride * 2 : 16);
  };
  const cuuint64_t strides[] = {bytes(heads, x.head), bytes(tokens, x.token),
                                bytes(batch, x.batch)};
  const cuuint32_t box[] = {kTileColumns, 1, kC, 1}, steps[] = {1, 1, 1, 1};
  const auto type = dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                              : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return bind_context() &&
         encoder()(&map, type, 4, const_cast<void*>(static_cast<const void*>(x.data)), sizes,
                   strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Whether this device and dtype are those of this folder's kernels.
inline bool device_applies(DType dtype) {
  return (dtype == DType::kBFloat16 || dtype == DType::kFloat16) &&
         attribute(cudaDevAttrComputeCapabilityMajor) == 9 && encoder() != nullptr;
}

}  // namespace efla::cuda::sm90
