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
  const int64_t blocks = places * args.common.value_heads * (args.common.columns / kV);
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

// Tokens that a block of prepare_kernel takes.
inline constexpr int64_t kPrepareTokens = 1024;

// Prepares every chunk for the walks that follow.
template <typename T, int kK, bool kErase, bool kDecay>
cudaError_t launch_prepare(const ScanMaps& maps, ScanArgs& args, cudaStream_t stream) {
  const ChunkArgs& a = args.common;
  constexpr int kBytes = sizeof(PrepareShared<kK>);
  static_assert(2 * (kBytes + 1024) <= 228 * 1024);
  ScanArgs runs = args;
  runs.part_tokens = kPrepareTokens;
  const int64_t blocks =
      chunk_slots(a.sequences, a.tokens, a.cu_seqlens != nullptr, kPrepareTokens) * a.value_heads;
  args.prepared = true;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  auto* kernel = prepare_kernel<T, kK, kErase, kDecay>;
  if (auto e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)) {
    return e;
  }
  kernel<<<static_cast<unsigned>(blocks), kPrepareThreads, kBytes, stream>>>(maps, runs,
                                                                             args.part_tokens);
  return cudaGetLastError();
}

// Calls run(erase, decay) with what the walks have as template arguments.
template <typename Run>
cudaError_t with_rule(const ChunkArgs& a, Run run) {
  using Yes = std::true_type;
  using No = std::false_type;
  const bool decay = a.log_decay.data != nullptr;
  if (erases(a.rule)) return decay ? run(Yes{}, Yes{}) : run(Yes{}, No{});
  return decay ? run(No{}, Yes{}) : run(No{}, No{});
}

// Lays out what a plan keeps of the parts; returns the place of what their walks start from.
inline float* set_parts(ScanArgs& args, const ScanPlan& plan, void* parts) {
  const ChunkArgs& a = args.common;
  const int64_t size = plan.part_slots * a.value_heads * a.columns * a.columns;
  args.part_tokens = plan.part_tokens;
  args.transitions = static_cast<float*>(parts);
  args.part_results = args.transitions + 2 * size;
  return args.transitions + size;
}

template <int kK, bool kReverse>
cudaError_t launch_join(const ScanArgs& args, float* states, cudaStream_t stream) {
  const ChunkArgs& a = args.common;
  constexpr int kBytes = sizeof(JoinShared<kK>);
  auto* kernel = join_kernel<kK, kReverse>;
  if (auto e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)) {
    return e;
  }
  const dim3 grid(static_cast<unsigned>(a.sequences * a.value_heads), kK / kJoinColumns);
  kernel<<<grid, kJoinThreads<kK>, kBytes, stream>>>(args, states);
  return cudaGetLastError();
}

// Prepares the chunks, then the state before each part, to `states`.
template <typename T, int kK, int kV, bool kErase, bool kDecay>
cudaError_t launch_part_states(const ScanMaps& maps, ScanArgs& args, const ScanPlan& plan,
                               float* states, cudaStream_t stream) {
  if (auto e = launch_prepare<T, kK, kErase, kDecay>(maps, args, stream)) return e;
  if (auto e = launch_walk<T, kK, kV, kErase, kDecay, Walk::kAdvance>(maps, args, plan.part_slots,
                                                                      stream)) {
    return e;
  }
  return launch_join<kK, false>(args, states, stream);
}

// The same for K and V padded to kDim, which the backward shares with the forward.
template <typename T, int kDim>
cudaError_t launch_square_part_states(const ScanMaps& maps, ScanArgs& args, const ScanPlan& plan,
                                      float* states, cudaStream_t stream) {
  return with_rule(args.common, [&](auto erase, auto decay) {
    return launch_part_states<T, kDim, kDim, erase.value, decay.value>(maps, args, plan, states,
                                                                       stream);
  });
}

template <typename T, int kK, int kV, bool kErase, bool kDecay>
cudaError_t launch_parts(const ScanMaps& maps, ScanArgs args, const ScanPlan& plan, float* states,
                         cudaStream_t stream) {
  if (plan.part_tokens == 0) {
    return launch_walk<T, kK, kV, kErase, kDecay, Walk::kOutput>(maps, args, args.common.sequences,
                                                                 stream);
  }
  if (auto e = launch_part_states<T, kK, kV, kErase, kDecay>(maps, args, plan, states, stream)) {
    return e;
  }
  args.part_states = states;
  args.prepared = false;  // without scores
  return launch_walk<T, kK, kV, kErase, kDecay, Walk::kOutput>(maps, args, plan.part_slots, stream);
}

template <typename T>
cudaError_t launch_scan(const ScanMaps& maps, const ScanArgs& args, const ScanPlan& plan,
                        float* states, cudaStream_t stream) {
  const auto run = [&](auto key_dim, auto value_tile) {
    constexpr int kK = decltype(key_dim)::value, kV = decltype(value_tile)::value;
    return with_rule(args.common, [&](auto erase, auto decay) {
      return launch_parts<T, kK, kV, erase.value, decay.value>(maps, args, plan, states, stream);
    });
  };
  using Narrow = std::integral_constant<int, 64>;
  using Wide = std::integral_constant<int, 128>;
  const bool split = plan.part_tokens > 0;  // by square transitions
  const int64_t key_dim = split ? args.common.columns : padded_dim(args.common.key_dim);
  if (key_dim == 64) return run(Narrow{}, Narrow{});
  return plan.value_tile == 64 ? run(Wide{}, Narrow{}) : run(Wide{}, Wide{});
}

extern template cudaError_t launch_scan<__nv_bfloat16>(const ScanMaps&, const ScanArgs&,
                                                       const ScanPlan&, float*, cudaStream_t);
extern template cudaError_t launch_scan<__half>(const ScanMaps&, const ScanArgs&, const ScanPlan&,
                                                float*, cudaStream_t);
// In the files of launch_scan.
#define EFLA_SQUARE_PART_STATES(EXTERN, T, DIM)                  \
  EXTERN template cudaError_t launch_square_part_states<T, DIM>( \
      const ScanMaps&, ScanArgs&, const ScanPlan&, float*, cudaStream_t);
EFLA_SQUARE_PART_STATES(extern, __nv_bfloat16, 64)
EFLA_SQUARE_PART_STATES(extern, __nv_bfloat16, 128)
EFLA_SQUARE_PART_STATES(extern, __half, 64)
EFLA_SQUARE_PART_STATES(extern, __half, 128)

}  // namespace efla::cuda::sm90
