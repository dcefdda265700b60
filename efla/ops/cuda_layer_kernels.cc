#include "efla/ops/cuda_layer_kernels.h"

#include <torch/torch.h>

#ifdef EFLA_CUDA

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "efla/kernels/cuda/layer_ops/layer_ops.h"

#endif

namespace efla::ops {
namespace {

#ifdef EFLA_CUDA

// launch(workspace, stream) on x's device, after the checks that every operator shares.
template <typename Launch>
void run(const char* op, const at::Tensor& x, int64_t workspace_bytes, const Launch& launch) {
  TORCH_CHECK(x.scalar_type() != at::kDouble, op,
              ": float64 has no CUDA kernel; use float32, bfloat16 or float16 (the first argument "
              "has shape ",
              x.sizes(), "), or move the tensors to the CPU");
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor workspace = at::empty({workspace_bytes}, x.options().dtype(at::kByte));
  const cudaError_t error =
      launch(workspace.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream().stream());
  TORCH_CHECK(error == cudaSuccess, op, ": the CUDA kernel could not be launched (",
              cudaGetErrorString(error), "); the first argument has shape ", x.sizes());
}

#else

[[noreturn]] void no_kernels(const char* op) {
  TORCH_CHECK(false, op, ": this build has no CUDA kernels");
}

#endif

}  // namespace

#ifdef EFLA_CUDA

void cuda_short_conv_forward(const char* op, const at::Tensor& x, const ShortConvParams& params) {
  run(op, x, 0,
      [&](void*, cudaStream_t stream) { return cuda::short_conv_forward(params, stream); });
}

void cuda_short_conv_backward(const char* op, const at::Tensor& x,
                              const ShortConvBackwardParams& params) {
  run(op, x, cuda::short_conv_backward_workspace(params),
      [&](void* workspace, cudaStream_t stream) {
        return cuda::short_conv_backward(params, workspace, stream);
      });
}

void cuda_rms_norm_forward(const char* op, const at::Tensor& x, const RmsNormParams& params) {
  run(op, x, 0, [&](void*, cudaStream_t stream) { return cuda::rms_norm_forward(params, stream); });
}

void cuda_rms_norm_backward(const char* op, const at::Tensor& x,
                            const RmsNormBackwardParams& params) {
  run(op, x, cuda::rms_norm_backward_workspace(params), [&](void* workspace, cudaStream_t stream) {
    return cuda::rms_norm_backward(params, workspace, stream);
  });
}

void cuda_swiglu_forward(const char* op, const at::Tensor& x, const SwigluParams& params) {
  run(op, x, 0, [&](void*, cudaStream_t stream) { return cuda::swiglu_forward(params, stream); });
}

void cuda_swiglu_backward(const char* op, const at::Tensor& x, const SwigluBackwardParams& params) {
  run(op, x, 0, [&](void*, cudaStream_t stream) { return cuda::swiglu_backward(params, stream); });
}

#else

void cuda_short_conv_forward(const char* op, const at::Tensor&, const ShortConvParams&) {
  no_kernels(op);
}
void cuda_short_conv_backward(const char* op, const at::Tensor&, const ShortConvBackwardParams&) {
  no_kernels(op);
}
void cuda_rms_norm_forward(const char* op, const at::Tensor&, const RmsNormParams&) {
  no_kernels(op);
}
void cuda_rms_norm_backward(const char* op, const at::Tensor&, const RmsNormBackwardParams&) {
  no_kernels(op);
}
void cuda_swiglu_forward(const char* op, const at::Tensor&, const SwigluParams&) { no_kernels(op); }
void cuda_swiglu_backward(const char* op, const at::Tensor&, const SwigluBackwardParams&) {
  no_kernels(op);
}

#endif

}  // namespace efla::ops
