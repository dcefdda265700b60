// Launches the backward on Hopper for one storage type; one small file per type instantiates it.
#pragma once

#include "efla/kernels/cuda/sm90/reverse.cuh"
#include "efla/kernels/cuda/sm90/scan_launch.cuh"

namespace efla::cuda::sm90 {

template <typename T, bool kErase, bool kDecay>
cudaError_t launch_passes(const ScanMaps& scan, const GradientMaps& maps, ScanArgs args,
                          const ScanPlan& plan, float* states, int64_t places,
                          cudaStream_t stream) {
  const ChunkArgs& a = args.common;
  const bool split = plan.part_tokens > 0;
  const int64_t walks = split ? plan.part_slots : a.sequences;
  if (split) {
    if (auto e = launch_wide_part_states<T>(scan, args, plan, states, stream)) return e;
    args.part_states = states;
  }
  if (auto e = launch_walk<T, kDim, kDim, kErase, kDecay, Walk::kKeep>(scan, args, walks, stream)) {
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
  const auto reverse = [&](auto* kernel) {
    return launch(kernel, walks * a.value_heads, kReverseThreads, sizeof(ReverseShared), args);
  };
  if (split) {  // N' and dS take the places of N and S, which are used up
    if (auto e = reverse(reverse_kernel<T, kErase, kDecay, true>)) return e;
    if (auto e = launch_join<kDim, true>(args, plan, states, stream)) return e;
  }
  if (auto e = reverse(reverse_kernel<T, kErase, kDecay, false>)) return e;
  return launch(gradients_kernel<T, kDecay>, places, kGradientGroups * kWarpgroup,
                sizeof(GradientShared), a);
}

template <typename T>
cudaError_t launch_backward(const ScanMaps& scan, const GradientMaps& maps, const ScanArgs& args,
                            const ScanPlan& plan, float* states, int64_t places,
                            cudaStream_t stream) {
  return with_rule(args.common, [&](auto erase, auto decay) {
    return launch_passes<T, erase.value, decay.value>(scan, maps, args, plan, states, places,
                                                      stream);
  });
}

extern template cudaError_t launch_backward<__nv_bfloat16>(const ScanMaps&, const GradientMaps&,
                                                           const ScanArgs&, const ScanPlan&, float*,
                                                           int64_t, cudaStream_t);
extern template cudaError_t launch_backward<__half>(const ScanMaps&, const GradientMaps&,
                                                    const ScanArgs&, const ScanPlan&, float*,
                                                    int64_t, cudaStream_t);

}  // namespace efla::cuda::sm90
