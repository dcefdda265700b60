// Host side of the backward on Hopper.
#pragma once

#include <cuda_runtime_api.h>

#include "efla/kernels/cuda/portable/chunk_common.cuh"
#include "efla/kernels/cuda/sm90/scan.h"

namespace efla::cuda::sm90 {

/// Whether backward() can run the problem on the current device: compute capability 9.0, 16-bit
/// storage, K and V multiples of 8 up to 128, tensors whose rows start on 16-byte boundaries.
bool backward_applies(const BackwardParams& params);

/// How backward() splits the sequences, by the forward's rule; whole where it cannot run anyway.
ScanPlan plan_backward(const Problem& problem);

/// Forward walk that keeps the states, then a walk back that makes the gradients. `args` comes with
/// the portable kernels' workspaces (contents are not the same, and K and V are padded to
/// square_dim(), which is `columns`; grad_states and grad_r are not used) and the place of dq and
/// dk, which are float parts for grouped heads; `parts` holds parts_workspace() bytes,
/// `checkpoints` is what scan_forward() left under the same plan, or null. Slack rows of the
/// gradients are the caller's.
cudaError_t backward(const ChunkArgs& args, DType dtype, const ScanPlan& plan,
                     const void* checkpoints, void* parts, cudaStream_t stream);

}  // namespace efla::cuda::sm90
