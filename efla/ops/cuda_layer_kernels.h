// The CUDA kernels behind the layer operators, on the current stream of x's device and with
// workspaces from torch's allocator. `x` is the operator's first tensor: its device and, for
// messages, its shape. In a build without the CUDA part no CUDA tensor passes check_device, so
// these are never reached.
#pragma once

#include <ATen/core/Tensor.h>

#include "efla/kernels/layer_params.h"

namespace efla::ops {

void cuda_short_conv_forward(const char* op, const at::Tensor& x, const ShortConvParams& params);
void cuda_short_conv_backward(const char* op, const at::Tensor& x,
                              const ShortConvBackwardParams& params);
void cuda_rms_norm_forward(const char* op, const at::Tensor& x, const RmsNormParams& params);
void cuda_rms_norm_backward(const char* op, const at::Tensor& x,
                            const RmsNormBackwardParams& params);
void cuda_swiglu_forward(const char* op, const at::Tensor& x, const SwigluParams& params);
void cuda_swiglu_backward(const char* op, const at::Tensor& x, const SwigluBackwardParams& params);

}  // namespace efla::ops
