// Picks head size and chunk length and launches the portable chunk kernels for one storage type.
// Included by one small file per type, so that they compile in parallel.
#pragma once

#include "efla/kernels/cuda/portable/chunk_gradients.cuh"
#include "efla/kernels/cuda/portable/chunk_prepare.cuh"
#include "efla/kernels/cuda/portable/split_reverse.cuh"

namespace efla::cuda {

// K as the kernels pad it; 0 if there is no kernel.
inline int padded_key_dim(int64_t key_dim) {
  for (int k : {64, 128, 256}) {
    if (key_dim <= k) return k;
  }
  return 0;
}

// Sequences times heads from which on a scan no longer splits 128 columns of V over two blocks.
inline constexpr int64_t kManyTiles = 96;

// Shared memory of a block of the scans that split K = 256, the most that any kernel of it takes.
inline constexpr int kSplitBytes = sizeof(SplitShared<__half, 256, 64>);

// Tokens per chunk: what fits registers and the shared memory that a block may have.
constexpr int chunk_tokens(DType dtype, int64_t key_dim, int shared_bytes) {
  if (dtype == DType::kFloat32) return 32;
  return key_dim <= 128 || shared_bytes >= kSplitBytes ? 64 : 32;
}

template <typename Kernel>
cudaError_t launch(Kernel* kernel, int64_t blocks, int threads, int shared_bytes,
                   const ChunkArgs& a, cudaStream_t stream) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  if (auto e =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes)) {
    return e;
  }
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(a);
  return cudaGetLastError();
}

inline bool block_may_have(int shared_bytes) {
  int device = 0, most = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) ==
             cudaSuccess &&
         most >= shared_bytes;
}

// Forward: the scan. Backward: the scan that keeps the states, the reverse scan.
template <int kWarps, typename T, int kK, int kC>
cudaError_t launch_scans(const ChunkArgs& a, bool backward, cudaStream_t stream) {
  constexpr int kColumns = kScanColumns<kWarps>;
  const int64_t blocks = a.sequences * a.value_heads * ((a.value_dim + kColumns - 1) / kColumns);
  const auto run = [&](auto* forward, auto* keep, auto* reverse, int threads, int bytes) {
    if (!backward) return launch(forward, blocks, threads, bytes, a, stream);
    if (auto e = launch(keep, blocks, threads, bytes, a, stream)) return e;
    return launch(reverse, blocks, threads, bytes, a, stream);
  };
  constexpr bool kSplit = kWarps == kPairs && kC == 64;
  if constexpr (kSplit) {
    constexpr int kBytes = sizeof(SplitShared<T, kK, kC>);
    if (kK > 64 || block_may_have(kBytes)) {
      return run(split_scan_kernel<false, T, kK, kC>, split_scan_kernel<true, T, kK, kC>,
                 split_reverse_kernel<T, kK, kC>, kSplitThreads, kBytes);
    }
  }
  if constexpr (!kSplit || kK == 64) {
    return run(chunk_scan_kernel<false, T, kK, kC, kWarps>,
               chunk_scan_kernel<true, T, kK, kC, kWarps>, chunk_reverse_kernel<T, kK, kC, kWarps>,
               kWarps * 32, 2 * sizeof(ScanStage<T, kK, kC, kWarps>));
  }
  return cudaErrorInvalidValue;
}

template <typename T, int kK, int kC>
cudaError_t launch_chunk(const ChunkArgs& a, bool backward, cudaStream_t stream) {
  // Eight warps where V fills them and there are blocks for every multiprocessor all the same.
  constexpr int kWide = sizeof(T) == 2 && kK <= 128 ? 8 : 4;
  const int64_t chunks =
      chunk_slots(a.sequences, a.tokens, a.cu_seqlens != nullptr, kC) * a.value_heads;
  const bool wide = a.value_dim > 64 && a.sequences * a.value_heads >= kManyTiles &&
                    block_may_have(2 * sizeof(ScanStage<T, kK, kC, kWide>));
  if (auto e = launch(chunk_prepare_kernel<T, kK, kC>, chunks, kC * 2,
                      sizeof(PrepareShared<T, kK, kC>), a, stream)) {
    return e;
  }
  if (auto e = wide ? launch_scans<kWide, T, kK, kC>(a, backward, stream)
                    : launch_scans<4, T, kK, kC>(a, backward, stream)) {
    return e;
  }
  if (!backward) return cudaSuccess;
  return launch(chunk_gradients_kernel<T, kK, kC>, chunks, kGradientThreads<kK, kC>,
                sizeof(GradientShared<T, kK, kC>), a, stream);
}

// `chunk`: chunk_tokens(), by which the workspaces are laid out.
template <typename T>
cudaError_t chunk_typed(const ChunkArgs& a, int chunk, bool backward, cudaStream_t stream) {
  constexpr int kC = sizeof(T) == 4 ? 32 : 64;
  switch (padded_key_dim(a.key_dim)) {
    case 64:
      return launch_chunk<T, 64, kC>(a, backward, stream);
    case 128:
      return launch_chunk<T, 128, kC>(a, backward, stream);
    case 256:
      return chunk == kC ? launch_chunk<T, 256, kC>(a, backward, stream)
                         : launch_chunk<T, 256, 32>(a, backward, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

extern template cudaError_t chunk_typed<float>(const ChunkArgs&, int, bool, cudaStream_t);
extern template cudaError_t chunk_typed<__nv_bfloat16>(const ChunkArgs&, int, bool, cudaStream_t);
extern template cudaError_t chunk_typed<__half>(const ChunkArgs&, int, bool, cudaStream_t);

}  // namespace efla::cuda
