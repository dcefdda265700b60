// Host side of the Hopper gradients.
#pragma once

#include <cuda_runtime_api.h>

#include "efla/kernels/cuda/portable/chunk_common.cuh"

namespace efla::cuda::sm90 {

/// Whether gradients() can run the problem on the current device: compute capability 9.0, 16-bit
/// storage, K = V = 128, tensors whose rows start on 16-byte boundaries.
bool gradients_apply(const BackwardParams& params);

/// The chunks' gradients from the workspaces that the portable scans have filled: `args` with
/// backward workspaces, the place of dq and dk included (float parts for grouped heads).
cudaError_t gradients(const ChunkArgs& args, DType dtype, cudaStream_t stream);

}  // namespace efla::cuda::sm90
