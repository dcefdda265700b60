// Launches the Hopper scan for one storage type; one small file per type instantiates it.
#pragma once

#include "efla/kernels/cuda/sm90/join.cuh"
#include "efla/kernels/cuda/sm90/scan.cuh"
#include "efla/kernels/cuda/sm90/scan.h"

namespace efla::cuda::sm90 {

template <typename T, int kK, int kV, bool kErase, bool kDecay, Walk kWalk>
cudaError_t launch_walk(const ScanMaps& maps, const ScanArgs& args, int64_t places,
                        cudaStream_t stream) {
  constexpr int kBytes = sizeof(ScanShared<kK, kV, kWalk>);
  static_assert(kBytes <= 227 * 1024);
  const int64_t blocks = places * args.common.value_heads * (args.common.value_dim / kV);
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  auto* kernel = scan_kernel<T, kK, kV, kErase, kDecay, kWalk>;
  if (auto e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)) {
    return e;
  }
  const dim3 grid(static_cast<unsigned>(blocks), kWalk == Walk::kAdvance ? 2 : 1);
  kernel<<<grid, kScanThreads<kV>, kBytes, stream>>>(maps, args);
  return cudaGetLastError();
}

template <typename T, int kK, int kV, bool kErase, bool kDecay>
cudaError_t launch_parts(const ScanMaps& maps, ScanArgs args, const ScanPlan& plan, float* states,
                         cudaStream_t stream) {
  const ChunkArgs& a = args.common;
  if (plan.part_tokens == 0) {
    return launch_walk<T, kK, kV, kErase, kDecay, Walk::kOutput>(maps, args, a.sequences, stream);
  }
  if (auto e = launch_walk<T, kK, kV, kErase, kDecay, Walk::kAdvance>(maps, args, plan.part_slots,
                                                                      stream)) {
    return e;
  }
  const dim3 grid(static_cast<unsigned>(a.sequences * a.value_heads), a.value_dim / kJoinColumns);
  join_kernel<kK><<<grid, kJoinThreads, 0, stream>>>(args, states, plan.part_slots);
  if (auto e = cudaGetLastError()) return e;
  args.part_states = states;
  return launch_walk<T, kK, kV, kErase, kDecay, Walk::kOutput>(maps, args, plan.part_slots, stream);
}

template <typename T>
cudaError_t launch_scan(const ScanMaps& maps, const ScanArgs& args, const ScanPlan& plan,
                        float* states, cudaStream_t stream) {
  const auto run = [&](auto key_dim, auto value_tile) {
    constexpr int kK = decltype(key_dim)::value, kV = decltype(value_tile)::value;
    const bool decay = args.common.log_decay.data != nullptr;
    if (erases(args.common.rule)) {
      return decay ? launch_parts<T, kK, kV, true, true>(maps, args, plan, states, stream)
                   : launch_parts<T, kK, kV, true, false>(maps, args, plan, states, stream);
    }
    return decay ? launch_parts<T, kK, kV, false, true>(maps, args, plan, states, stream)
                 : launch_parts<T, kK, kV, false, false>(maps, args, plan, states, stream);
  };
  using Narrow = std::integral_constant<int, 64>;
  using Wide = std::integral_constant<int, 128>;
  if (args.common.key_dim == 64) return run(Narrow{}, Narrow{});
  return plan.value_tile == 64 ? run(Wide{}, Narrow{}) : run(Wide{}, Wide{});
}

extern template cudaError_t launch_scan<__nv_bfloat16>(const ScanMaps&, const ScanArgs&,
                                                       const ScanPlan&, float*, cudaStream_t);
extern template cudaError_t launch_scan<__half>(const ScanMaps&, const ScanArgs&, const ScanPlan&,
                                                float*, cudaStream_t);

}  // namespace efla::cuda::sm90
