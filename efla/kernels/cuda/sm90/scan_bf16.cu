#include "efla/kernels/cuda/sm90/scan_launch.cuh"

namespace efla::cuda::sm90 {
template cudaError_t launch_scan<__nv_bfloat16>(const ScanMaps&, const ScanArgs&, const ScanPlan&,
                                                float*, cudaStream_t);
EFLA_SQUARE_PART_STATES(, __nv_bfloat16, 64)
EFLA_SQUARE_PART_STATES(, __nv_bfloat16, 128)
}  // namespace efla::cuda::sm90
