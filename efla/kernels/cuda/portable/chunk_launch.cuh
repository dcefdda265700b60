// Picks head size and chunk length and launches the portable chunk kernels for one storage type.
// Included by one small file per type, so that they compile in parallel.
#pragma once

#include "efla/kernels/cuda/portable/chunk_gradients.cuh"
#include "efla/kernels/cuda/portable/chunk_prepare.cuh"
#include "efla/kernels/cuda/portable/chunk_reverse.cuh"
#include "efla/kernels/cuda/portable/chunk_scan.cuh"

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

// Tokens per chunk: what fits registers and shared memory.
template <typename T>
constexpr int chunk_tokens(int64_t key_dim) {
  return sizeof(T) == 4 || key_dim > 128 ? 32 : 64;
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

// Forward: the scan. Backward: the scan that keeps the states, the reverse scan, the gradients.
template <int kWarps, typename T, int kK>
cudaError_t launch_scans(const ChunkArgs& a, bool backward, cudaStream_t stream) {
  constexpr int kC = chunk_tokens<T>(kK);
  constexpr int kBytes = 2 * sizeof(ScanStage<T, kK, kC, kWarps>);
  constexpr int kColumns = kScanColumns<kWarps>;
  const int64_t blocks = a.sequences * a.value_heads * ((a.value_dim + kColumns - 1) / kColumns);
  if (!backward) {
    return launch(chunk_scan_kernel<false, T, kK, kC, kWarps>, blocks, kWarps * 32, kBytes, a,
                  stream);
  }
  if (auto e = launch(chunk_scan_kernel<true, T, kK, kC, kWarps>, blocks, kWarps * 32, kBytes, a,
                      stream)) {
    return e;
  }
  return launch(chunk_reverse_kernel<T, kK, kC, kWarps>, blocks, kWarps * 32, kBytes, a, stream);
}

template <typename T, int kK>
cudaError_t launch_chunk(const ChunkArgs& a, bool backward, cudaStream_t stream) {
  constexpr int kC = chunk_tokens<T>(kK);
  // Eight warps where V fills them and there are blocks for every multiprocessor all the same.
  constexpr int kWide = sizeof(T) == 2 && kK <= 128 ? 8 : 4;
  const int64_t chunks =
      chunk_slots(a.sequences, a.tokens, a.cu_seqlens != nullptr, kC) * a.value_heads;
  const bool wide = a.value_dim > 64 && a.sequences * a.value_heads >= kManyTiles;
  if (auto e = launch(chunk_prepare_kernel<T, kK, kC>, chunks, kC * 2,
                      sizeof(PrepareShared<T, kK, kC>), a, stream)) {
    return e;
  }
  if (auto e = wide ? launch_scans<kWide, T, kK>(a, backward, stream)
                    : launch_scans<4, T, kK>(a, backward, stream)) {
    return e;
  }
  if (!backward) return cudaSuccess;
  return launch(chunk_gradients_kernel<T, kK, kC>, chunks, kGradientThreads<kC>,
                sizeof(GradientShared<T, kK, kC>), a, stream);
}

template <typename T>
cudaError_t chunk_typed(const ChunkArgs& a, bool backward, cudaStream_t stream) {
  switch (padded_key_dim(a.key_dim)) {
    case 64:
      return launch_chunk<T, 64>(a, backward, stream);
    case 128:
      return launch_chunk<T, 128>(a, backward, stream);
    case 256:
      return launch_chunk<T, 256>(a, backward, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

extern template cudaError_t chunk_typed<float>(const ChunkArgs&, bool, cudaStream_t);
extern template cudaError_t chunk_typed<__nv_bfloat16>(const ChunkArgs&, bool, cudaStream_t);
extern template cudaError_t chunk_typed<__half>(const ChunkArgs&, bool, cudaStream_t);

}  // namespace efla::cuda
