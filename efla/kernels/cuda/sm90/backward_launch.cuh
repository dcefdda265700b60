// Launches the backward on Hopper for one storage type; one small file per type instantiates it.
#pragma once

#include "efla/kernels/cuda/sm90/reverse.cuh"
#include "efla/kernels/cuda/sm90/scan_launch.cuh"

namespace efla::cuda::sm90 {

template <typename T, bool kErase, bool kDecay>
cudaError_t launch_passes(const ScanMaps& scan, const GradientMaps& maps, const ChunkArgs& a,
                          int64_t places, cudaStream_t stream) {
  ScanArgs args{};
  args.common = a;
  if (auto e = launch_walk<T, kDim, kDim, kErase, kDecay, Walk::kKeep>(scan, args, a.sequences,
                                                                       stream)) {
    return e;
  }
  const auto launch = [&](auto* kernel, int64_t blocks, int threads, int bytes,
                          const auto& arguments) {
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorInvalidValue;
    if (auto e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) {
      return e;
    }
    kernel<<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(maps, arguments);
    return cudaGetLastError();
  };
  static_assert(sizeof(ReverseShared) <= 227 * 1024 && sizeof(GradientShared) <= 227 * 1024);
  if (auto e = launch(reverse_kernel<T, kErase, kDecay>, a.sequences * a.value_heads,
                      kReverseThreads, sizeof(ReverseShared), args)) {
    return e;
  }
  return launch(gradients_kernel<T, kDecay>, places, kGradientGroups * kWarpgroup,
                sizeof(GradientShared), a);
}

template <typename T>
cudaError_t launch_backward(const ScanMaps& scan, const GradientMaps& maps, const ChunkArgs& a,
                            int64_t places, cudaStream_t stream) {
  const bool decay = a.log_decay.data != nullptr;
  if (erases(a.rule)) {
    return decay ? launch_passes<T, true, true>(scan, maps, a, places, stream)
                 : launch_passes<T, true, false>(scan, maps, a, places, stream);
  }
  return decay ? launch_passes<T, false, true>(scan, maps, a, places, stream)
               : launch_passes<T, false, false>(scan, maps, a, places, stream);
}

extern template cudaError_t launch_backward<__nv_bfloat16>(const ScanMaps&, const GradientMaps&,
                                                           const ChunkArgs&, int64_t, cudaStream_t);
extern template cudaError_t launch_backward<__half>(const ScanMaps&, const GradientMaps&,
                                                    const ChunkArgs&, int64_t, cudaStream_t);

}  // namespace efla::cuda::sm90
