#include "efla/kernels/cuda/sm90/backward_launch.cuh"

namespace efla::cuda::sm90 {
template cudaError_t launch_backward<__half>(const ScanMaps&, const BackwardMaps&, const ScanArgs&,
                                             const ScanPlan&, float*, cudaStream_t);
}  // namespace efla::cuda::sm90
