#include "efla/kernels/cuda/sm90/backward_launch.cuh"

namespace efla::cuda::sm90 {
EFLA_BACKWARD(, __nv_bfloat16, 64)
}  // namespace efla::cuda::sm90
