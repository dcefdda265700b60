#include "efla/kernels/cuda/sm90/scan_launch.cuh"

namespace efla::cuda::sm90 {
template cudaError_t launch_scan<__half>(const ScanMaps&, const ScanArgs&, const ScanPlan&, float*,
                                         cudaStream_t);
EFLA_SQUARE_PART_STATES(, __half, 64)
EFLA_SQUARE_PART_STATES(, __half, 128)
}  // namespace efla::cuda::sm90
