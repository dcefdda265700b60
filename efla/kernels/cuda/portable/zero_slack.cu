// Zeroes the rows of a packed batch that belong to no sequence. Zero has the same bits in every
// storage type, so words of the right width are all it takes.

#include "efla/kernels/cuda/delta_rule.h"

namespace efla::cuda {
namespace {

template <typename Word>
__global__ void zero_slack_kernel(MutableView x, const int64_t* cu_seqlens, int64_t sequences,
                                  int64_t tokens, int heads, int dim) {
  const int64_t first = cu_seqlens[0], used = cu_seqlens[sequences] - first;
  for (int64_t row = blockIdx.x; row < tokens - used; row += gridDim.x) {
    const int64_t t = row < first ? row : row + used;
    for (int i = threadIdx.x; i < heads * dim; i += blockDim.x) {
      static_cast<Word*>(x.data)[t * x.token + i / dim * x.head + i % dim] = 0;
    }
  }
}

}  // namespace

cudaError_t zero_slack(const Problem& problem, const MutableView& x, int64_t heads, int64_t dim,
                       int64_t element_size, cudaStream_t stream) {
  const Shape& s = problem.shape;
  if (!problem.cu_seqlens || s.tokens == 0 || heads * dim == 0) return cudaSuccess;
  auto* kernel = element_size == 4 ? zero_slack_kernel<uint32_t> : zero_slack_kernel<uint16_t>;
  kernel<<<static_cast<unsigned>(s.tokens < 1024 ? s.tokens : 1024), 256, 0, stream>>>(
      x, problem.cu_seqlens, s.sequences, s.tokens, static_cast<int>(heads), static_cast<int>(dim));
  return cudaGetLastError();
}

}  // namespace efla::cuda
