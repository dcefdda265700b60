// Launches the backward on Hopper for one storage type and padded size; one small file
// instantiates each.
#pragma once

#include <cmath>

#include "efla/kernels/cuda/sm90/backward_walk.cuh"
#include "efla/kernels/cuda/sm90/scan_launch.cuh"

namespace efla::cuda::sm90 {

// Whether the chain holds dS over the scale: only where that makes a difference to the gradient of
// an initial state, since it costs 7 % of the backward's time.
inline bool holds_over_scale(const ChunkArgs& a) {
  int exponent;
  return a.grad_initial_state && !a.qk_l2norm && std::isnormal(a.scale) &&
         std::fabs(std::frexp(a.scale, &exponent)) != 0.5f;  // a power of two rounds nothing
}

template <typename T, int kDim, bool kErase, bool kDecay, bool kAdvance>
cudaError_t launch_walk_back(const BackwardMaps& maps, const ScanArgs& args, int64_t walks,
                             cudaStream_t stream) {
  constexpr int kBytes = sizeof(BackwardShared<kDim, kAdvance>);
  static_assert(kBytes <= 227 * 1024);
  const int64_t blocks = walks * args.common.value_heads;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const ChunkArgs& a = args.common;
  const bool padded = kAdvance || a.key_dim < kDim || a.value_dim < kDim;
  const auto choose = [&](auto over_scale) {
    constexpr bool kOver = over_scale.value;
    return padded ? backward_kernel<T, kDim, true, kErase, kDecay, kAdvance, kOver>
                  : backward_kernel<T, kDim, kAdvance, kErase, kDecay, kAdvance, kOver>;
  };
  auto* kernel = choose(std::false_type{});
  if constexpr (kIsBfloat16<T> && !kDecay) {  // half has not the range
    if (holds_over_scale(a)) kernel = choose(std::true_type{});
  }
  return launch(kernel, static_cast<unsigned>(blocks), kBackwardThreads<kDim, kAdvance>, kBytes,
                stream, maps, args);
}

template <typename T, int kDim, bool kErase, bool kDecay>
cudaError_t launch_passes(const ScanMaps& scan, const BackwardMaps& maps, ScanArgs args,
                          const ScanPlan& plan, float* states, cudaStream_t stream) {
  const bool split = plan.part_tokens > 0;
  const int64_t walks = split ? plan.part_slots : args.common.sequences;
  if (split) {
    if (!args.part_states) {  // the forward has not left them
      if (auto e = launch_square_part_states<T, kDim>(scan, args, plan, states, stream)) return e;
      args.part_states = states;
    }
  }
  if (auto e = launch_walk<T, kDim, kDim, kErase, kDecay, Walk::kKeep>(scan, args, walks, stream)) {
    return e;
  }
  if (split) {  // dS takes the place of S, which is used up
    if (auto e = launch_walk_back<T, kDim, kErase, kDecay, true>(maps, args, walks, stream)) {
      return e;
    }
    if (auto e = launch_join<kDim, true>(args, states, stream)) return e;
    args.part_states = states;
  }
  return launch_walk_back<T, kDim, kErase, kDecay, false>(maps, args, walks, stream);
}

template <typename T, int kDim>
cudaError_t launch_backward(const ScanMaps& scan, const BackwardMaps& maps, const ScanArgs& args,
                            const ScanPlan& plan, float* states, cudaStream_t stream) {
  return with_rule(args.common, [&](auto erase, auto decay) {
    return launch_passes<T, kDim, erase.value, decay.value>(scan, maps, args, plan, states, stream);
  });
}

#define EFLA_BACKWARD(EXTERN, T, DIM)                                                           \
  EXTERN template cudaError_t launch_backward<T, DIM>(const ScanMaps&, const BackwardMaps&,     \
                                                      const ScanArgs&, const ScanPlan&, float*, \
                                                      cudaStream_t);
EFLA_BACKWARD(extern, __nv_bfloat16, 64)
EFLA_BACKWARD(extern, __nv_bfloat16, 128)
EFLA_BACKWARD(extern, __half, 64)
EFLA_BACKWARD(extern, __half, 128)

}  // namespace efla::cuda::sm90
