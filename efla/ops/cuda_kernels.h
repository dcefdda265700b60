// The CUDA kernels behind the operators, on the current stream of q's device and with workspaces
// from torch's allocator. In a build without the CUDA part no CUDA tensor passes check_device, so
// these are never reached.
#pragma once

#include "efla/kernels/params.h"
#include "efla/ops/delta_rule_arguments.h"

namespace efla::ops {

/// Forward of chunk (K <= 256; above that token by token) or recurrent.
void cuda_forward(const DeltaRuleArguments& arguments, const ForwardParams& params,
                  bool sequential);

/// Backward of both, K <= 256. params.grad_v may be null.
void cuda_backward(const DeltaRuleArguments& arguments, BackwardParams params);

/// step_; params.state_indices is in device memory.
void cuda_step(const DeltaRuleArguments& arguments, const StepParams& params);

}  // namespace efla::ops
