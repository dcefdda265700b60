#include "efla/kernels/cuda/portable/chunk_launch.cuh"

namespace efla::cuda {
template cudaError_t chunk_typed<__half>(const ChunkArgs&, int, bool, cudaStream_t);
}  // namespace efla::cuda
