// How the kernels run in parallel inside a libtorch process: on torch's own intra-op threads, so
// that torch.set_num_threads / at::set_num_threads governs them and no second pool exists.
#pragma once

#include "efla/kernels/params.h"

namespace efla::ops {

/// An executor over torch's intra-op pool. One thread inside another parallel region.
Executor torch_executor();

}  // namespace efla::ops
