// The layer's other CPU kernels; their parameters are in layer_params.h.
#pragma once

#include "efla/kernels/layer_params.h"

namespace efla::cpu {

void short_conv_forward(const ShortConvParams& params, const Executor& executor);
void short_conv_backward(const ShortConvBackwardParams& params, const Executor& executor);

void rms_norm_forward(const RmsNormParams& params, const Executor& executor);
void rms_norm_backward(const RmsNormBackwardParams& params, const Executor& executor);

void swiglu_forward(const SwigluParams& params, const Executor& executor);
void swiglu_backward(const SwigluBackwardParams& params, const Executor& executor);

}  // namespace efla::cpu
