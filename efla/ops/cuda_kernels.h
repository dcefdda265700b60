// The CUDA kernels behind the operators, on the current stream of q's device and with workspaces
// from torch's allocator. In a build without the CUDA part no CUDA tensor passes check_device, so
// these are never reached.
#pragma once

#include "efla/kernels/params.h"
#include "efla/ops/delta_rule_arguments.h"

namespace efla::ops {

/// Forward of chunk (K <= 256; above that token by token) or recurrent. Returns what backward can
/// use: a tensor of no elements, for its size depends on the device, whose storage holds it.
at::Tensor cuda_forward(const DeltaRuleArguments& arguments, ForwardParams params, bool sequential);

/// Backward of both, K <= 256. params.grad_v may be null. `kept` is what cuda_forward() returned,
/// or any other tensor: then it is computed again.
void cuda_backward(const DeltaRuleArguments& arguments, BackwardParams params,
                   const at::Tensor& kept);

/// step_; params.state_indices is in device memory.
void cuda_step(const DeltaRuleArguments& arguments, const StepParams& params);

}  // namespace efla::ops
