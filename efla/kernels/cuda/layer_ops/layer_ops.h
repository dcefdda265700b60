// The layer's other operators on NVIDIA GPUs: causal depthwise convolution, RMS norm, SwiGLU. The
// structs are those of layer_params.h with every pointer in device memory, cu_seqlens included, so
// nothing waits for the device and all of it can be captured in a CUDA graph. Storage types: float,
// bfloat16, half; arithmetic is float. No atomics: the same inputs give the same bits.
//
// Every function returns the launch's error, cudaErrorInvalidValue for a dtype or a size that it
// does not have.
#pragma once

#include <cuda_runtime_api.h>

#include "efla/kernels/layer_params.h"

namespace efla::cuda {

/// The widest filter of short_conv.
inline constexpr int64_t kMaxConvWidth = 64;

/// Any width up to kMaxConvWidth; 4 is the fast one.
cudaError_t short_conv_forward(const ShortConvParams& params, cudaStream_t stream);
/// Bytes that short_conv_backward needs as workspace (256-byte aligned).
int64_t short_conv_backward_workspace(const ShortConvBackwardParams& params);
cudaError_t short_conv_backward(const ShortConvBackwardParams& params, void* workspace,
                                cudaStream_t stream);

cudaError_t rms_norm_forward(const RmsNormParams& params, cudaStream_t stream);
/// Bytes that rms_norm_backward needs as workspace (256-byte aligned).
int64_t rms_norm_backward_workspace(const RmsNormBackwardParams& params);
cudaError_t rms_norm_backward(const RmsNormBackwardParams& params, void* workspace,
                              cudaStream_t stream);

cudaError_t swiglu_forward(const SwigluParams& params, cudaStream_t stream);
cudaError_t swiglu_backward(const SwigluBackwardParams& params, cudaStream_t stream);

}  // namespace efla::cuda
