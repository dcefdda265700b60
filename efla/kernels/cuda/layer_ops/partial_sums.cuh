// The second half of a gradient that sums over rows: the first kernel leaves one partial sum per
// group of rows, this one adds the groups in a fixed order.
#pragma once

#include <cstdint>

namespace efla::cuda::layer {

inline constexpr int kSumLanes = 32;  // columns of a block
inline constexpr int kSumParts = 16;  // threads that share a column

/// out[(j % inner) * (columns / inner) + j / inner] = sum over groups of partial[group * stride +
/// j] for j < columns: inner = columns keeps the order, inner = D turns [W, D] into [D, W].
__global__ inline void add_partial_sums(const float* partial, int64_t groups, int64_t stride,
                                        int64_t columns, int64_t inner, float* out) {
  __shared__ float sums[kSumParts][kSumLanes];
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kSumLanes + threadIdx.x;
  float sum = 0.0f;
  if (j < columns) {
    for (int64_t g = threadIdx.y; g < groups; g += kSumParts) sum += partial[g * stride + j];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || j >= columns) return;
  for (int i = 1; i < kSumParts; ++i) sum += sums[i][threadIdx.x];
  out[j % inner * (columns / inner) + j / inner] = sum;
}

inline void launch_partial_sums(const float* partial, int64_t groups, int64_t stride,
                                int64_t columns, int64_t inner, void* out, cudaStream_t stream) {
  const dim3 threads(kSumLanes, kSumParts);
  const auto blocks = static_cast<unsigned>((columns + kSumLanes - 1) / kSumLanes);
  add_partial_sums<<<blocks, threads, 0, stream>>>(partial, groups, stride, columns, inner,
                                                   static_cast<float*>(out));
}

}  // namespace efla::cuda::layer
