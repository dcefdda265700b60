#include "efla/kernels/cuda/sm90/scan_launch.cuh"

namespace efla::cuda::sm90 {
template cudaError_t launch_scan<__half>(const ScanMaps&, const ScanArgs&, const ScanPlan&, float*,
                                         cudaStream_t);
template cudaError_t launch_wide_part_states<__half>(const ScanMaps&, const ScanArgs&,
                                                     const ScanPlan&, float*, cudaStream_t);
}  // namespace efla::cuda::sm90
