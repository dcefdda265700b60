// Launches the Hopper scan for one storage type; one small file per type instantiates it.
#pragma once

#include "efla/kernels/cuda/sm90/join.cuh"
#include "efla/kernels/cuda/sm90/scan.cuh"
#include "efla/kernels/cuda/sm90/scan.h"
#include "efla/kernels/cuda/sm90/tensor_map.h"

namespace efla::cuda::sm90 {

// Launches a kernel so that it may begin before the work ahead of it in the stream has ended
// (programmatic dependent launch): in it wait_for_stream() comes before all that is not its own.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes,
                   cudaStream_t stream, const Arguments&... arguments) {
  if (auto e =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes)) {
    return e;
  }
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  if (cudaLaunchKernelEx(&config, kernel, arguments...) != cudaSuccess) return cudaGetLastError();
  return cudaSuccess;
}

inline int64_t advance_blocks(const ChunkArgs& a, int64_t places, int tile_columns) {
  return advance_blocks(2 * places * a.value_heads * (a.columns / tile_columns), processors());
}

template <typename T, int kK, int kV, bool kErase, bool kDecay, Walk kWalk>
cudaError_t launch_walk(const ScanMaps& maps, const ScanArgs& args, int64_t places,
                        cudaStream_t stream) {
  constexpr int kBytes = sizeof(ScanShared<kK, kV, kWalk>);
  static_assert(kBytes <= 227 * 1024);
  int64_t blocks = places * args.common.value_heads * (args.common.columns / kV);
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  if (kWalk == Walk::kAdvance) blocks = advance_blocks(args.common, places, kV);
  return launch(scan_kernel<T, kK, kV, kErase, kDecay, kWalk>, static_cast<unsigned>(blocks),
                kScanThreads<kV>, kBytes, stream, maps, args);
}

// Prepares every chunk for the walks that follow, and the flags of `advance` blocks.
template <typename T, int kK, bool kErase, bool kDecay, bool kScores>
cudaError_t launch_prepare(const ScanMaps& maps, const ScanArgs& args, int64_t advance,
                           cudaStream_t stream) {
  const ChunkArgs& a = args.common;
  constexpr int kBytes = sizeof(PrepareShared<kK, kScores>);
  static_assert(kPrepareBlocks<kScores> * (kBytes + 1024) <= 228 * 1024);
  const bool packed = a.cu_seqlens != nullptr;
  ScanArgs runs = args;
  // As many tokens a block as make all multiprocessors full once.
  const int64_t room = kPrepareBlocks<kScores> * processors() / a.value_heads;
  const int64_t tokens = a.tokens * (packed ? 1 : a.sequences) / std::max<int64_t>(1, room);
  runs.part_tokens = std::max<int64_t>(4, tokens / kC + 1) * kC;
  const int64_t blocks =
      chunk_slots(a.sequences, a.tokens, packed, runs.part_tokens) * a.value_heads;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const int64_t flags = advance * kHandOverWarps;
  if (flags > a.value_heads * a.columns * a.columns) return cudaErrorInvalidValue;
  return launch(prepare_kernel<T, kK, kErase, kDecay, kScores>, static_cast<unsigned>(blocks),
                kPrepareThreads, kBytes, stream, maps, runs, args.part_tokens,
                static_cast<int>(flags));
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
  const dim3 grid(static_cast<unsigned>(a.sequences * a.value_heads), kK / 64);
  return launch(join_kernel<kK, kReverse>, grid, kWarpgroup, sizeof(JoinShared<kK>), stream, args,
                states);
}

// Prepares the chunks, then the state before each part, to `states`.
template <typename T, int kK, int kV, bool kErase, bool kDecay>
cudaError_t launch_part_states(const ScanMaps& maps, ScanArgs& args, const ScanPlan& plan,
                               float* states, cudaStream_t stream) {
  const int64_t blocks = advance_blocks(args.common, plan.part_slots, kV);
  auto* prepare = args.common.scores ? launch_prepare<T, kK, kErase, kDecay, true>
                                     : launch_prepare<T, kK, kErase, kDecay, false>;
  if (auto e = prepare(maps, args, blocks, stream)) return e;
  args.prepared = true;
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
