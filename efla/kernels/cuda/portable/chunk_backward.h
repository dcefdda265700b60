// chunk_backward() of delta_rule.h with the split of long sequences on Hopper in the caller's
// hands: the tests take parts that are shorter than pays.
#pragma once

#include "efla/kernels/cuda/delta_rule.h"
#include "efla/kernels/cuda/sm90/scan.h"

namespace efla::cuda {

int64_t chunk_backward_workspace(const BackwardParams& params, const sm90::ScanPlan& plan,
                                 Family family);

cudaError_t chunk_backward(const BackwardParams& params, const sm90::ScanPlan& plan,
                           void* workspace, cudaStream_t stream, Family family);

}  // namespace efla::cuda
