#include "efla/kernels/cuda/sm90/backward_launch.cuh"

namespace efla::cuda::sm90 {
template cudaError_t launch_backward<__half>(const ScanMaps&, const GradientMaps&, const ScanArgs&,
                                             const ScanPlan&, float*, int64_t, cudaStream_t);
}  // namespace efla::cuda::sm90
