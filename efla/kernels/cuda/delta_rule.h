// The delta-rule family on NVIDIA GPUs, for every step rule. The structs are those of params.h with
// every pointer in device memory, cu_seqlens and state_indices included: nothing here waits for the
// device, so all of it can be captured in a CUDA graph. Storage types: float, bfloat16, half;
// arithmetic is float, and so are states, which step alone also takes as bfloat16 or half.
#pragma once

#include <cuda_runtime_api.h>

#include "efla/kernels/params.h"

namespace efla::cuda {

/// Which kernels run a problem.
enum class Family {
  kAuto,           // those made for the device and the problem, else the portable ones
  kPortable,       // mma.sync, for any device of compute capability 8.0 or newer
  kPortableSmall,  // the same as if a block could have no more than 99 KiB of shared memory (tests)
};

/// Bytes that chunk_forward needs as workspace (256-byte aligned); looks at sizes, strides and
/// alignment, and whether checkpoints are given.
int64_t chunk_forward_workspace(const ForwardParams& params, Family family = Family::kAuto);

/// Bytes of what chunk_forward can leave for chunk_backward (256-byte aligned): 0 but for long
/// sequences split on Hopper. Looks at the same as the workspaces' sizes.
int64_t chunk_checkpoint_bytes(const ForwardParams& params, Family family = Family::kAuto);
int64_t chunk_checkpoint_bytes(const BackwardParams& params, Family family = Family::kAuto);

/// Chunkwise forward for K <= 256. params.checkpoints: chunk_checkpoint_bytes(), or null. float
/// inputs are multiplied as TF32 x 3, relative error about 1e-6; bfloat16 and half on tensor cores
/// with float accumulation. Returns the launch's error; cudaErrorInvalidValue for a dtype or a size
/// it does not have.
cudaError_t chunk_forward(const ForwardParams& params, void* workspace, cudaStream_t stream,
                          Family family = Family::kAuto);

/// Bytes that chunk_backward needs as workspace (256-byte aligned) for the same arguments.
int64_t chunk_backward_workspace(const BackwardParams& params, Family family = Family::kAuto);

/// Chunkwise backward for K <= 256; recomputes what it needs from the inputs, but for
/// params.checkpoints, if not null: what chunk_forward left of the same problem and family. grad_v
/// is required, the other gradients may be null.
cudaError_t chunk_backward(const BackwardParams& params, void* workspace, cudaStream_t stream,
                           Family family = Family::kAuto);

/// Token by token over whole sequences. params.checkpoints is not supported (must be null).
/// Returns the launch's error; cudaErrorInvalidValue for a dtype or a size it does not have.
cudaError_t recurrent_forward(const ForwardParams& params, cudaStream_t stream);

/// In-place step on a pool of states, any T. A row whose state index lies outside [0, P) is
/// padding: its o is 0 and no state is touched.
cudaError_t step(const StepParams& params, cudaStream_t stream);

/// Zeroes the rows of a packed batch that belong to no sequence in x [B, T, heads, dim] (nothing to
/// do when dense); element_size is 2 or 4 bytes. The functions above call it.
cudaError_t zero_slack(const Problem& problem, const MutableView& x, int64_t heads, int64_t dim,
                       int64_t element_size, cudaStream_t stream);

}  // namespace efla::cuda
