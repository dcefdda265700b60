#include "efla/ops/cuda_kernels.h"

#include <torch/torch.h>

#ifdef EFLA_CUDA

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdlib>
#include <string_view>

#include "efla/kernels/cuda/delta_rule.h"

namespace efla::ops {
namespace {

constexpr int64_t kMaxChunkKeyDim = 256;

void check_dtype(const DeltaRuleArguments& a) {
  TORCH_CHECK(a.q.scalar_type() != at::kDouble, a.op,
              ": float64 has no CUDA kernel; use float32, bfloat16 or float16 (q has shape ",
              a.q.sizes(), "), or move the tensors to the CPU");
}

void check_launch(const DeltaRuleArguments& a, cudaError_t error) {
  if (error == cudaErrorNoKernelImageForDevice) {
    cudaDeviceProp device{};
    cudaGetDeviceProperties(&device, a.q.get_device());
    TORCH_CHECK(false, a.op, ": ", device.name, " has compute capability ", device.major, ".",
                device.minor, ", for which this build has no kernels: move the tensors to the CPU",
                device.major < 8 ? " (8.0 is the oldest)"
                                 : ", or build with CMAKE_CUDA_ARCHITECTURES for it");
  }
  TORCH_CHECK(error == cudaSuccess, a.op, ": the CUDA kernel could not be launched (",
              cudaGetErrorString(error), ") for q of shape ", a.q.sizes(), " and v of shape ",
              a.v.sizes());
}

// EFLA_CUDA_KERNELS=portable in the environment when the library is first used keeps to the
// portable kernels, so that they can be tested where others would run.
cuda::Family family() {
  static const cuda::Family chosen = [] {
    const char* name = std::getenv("EFLA_CUDA_KERNELS");
    const bool portable = name != nullptr && std::string_view(name) == "portable";
    return portable ? cuda::Family::kPortable : cuda::Family::kAuto;
  }();
  return chosen;
}

at::Tensor workspace(const at::Tensor& like, int64_t bytes) {
  return at::empty({bytes}, like.options().dtype(at::kByte));
}

}  // namespace

at::Tensor cuda_forward(const DeltaRuleArguments& a, ForwardParams params, bool sequential) {
  check_dtype(a);
  at::Tensor kept = at::empty({0}, a.q.options().dtype(at::kFloat));
  const c10::cuda::CUDAGuard guard(a.q.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const Problem& p = params.problem;
  if (sequential || p.shape.key_dim > kMaxChunkKeyDim) {
    check_launch(a, cuda::recurrent_forward(params, stream));
    return kept;
  }
  if (const int64_t bytes = cuda::chunk_checkpoint_bytes(params, family())) {
    const at::Tensor checkpoints = workspace(a.q, bytes);
    params.checkpoints = checkpoints.mutable_data_ptr();
    kept.set_(checkpoints.storage(), 0, {0}, {1});
  }
  const at::Tensor scratch = workspace(a.q, cuda::chunk_forward_workspace(params, family()));
  check_launch(a, cuda::chunk_forward(params, scratch.mutable_data_ptr(), stream, family()));
  return kept;
}

void cuda_backward(const DeltaRuleArguments& a, BackwardParams params, const at::Tensor& kept) {
  check_dtype(a);
  const c10::cuda::CUDAGuard guard(a.q.device());
  const Problem& p = params.problem;
  TORCH_CHECK(p.shape.key_dim <= kMaxChunkKeyDim, a.op, ": on CUDA K may be at most ",
              kMaxChunkKeyDim, " where a gradient is needed, but q has shape ", a.q.sizes());
  at::Tensor grad_v;
  if (params.grad_v.data == nullptr) {
    grad_v = at::empty(a.v.sizes(), a.v.options().memory_format(at::MemoryFormat::Contiguous));
    params.grad_v = mutable_view_of(grad_v);
  }
  const int64_t bytes = cuda::chunk_checkpoint_bytes(params, family());
  const bool has_kept = bytes > 0 && kept.device() == a.q.device() && kept.has_storage() &&
                        kept.storage().nbytes() == static_cast<size_t>(bytes);
  params.checkpoints = has_kept ? kept.storage().data() : nullptr;
  const at::Tensor scratch = workspace(a.q, cuda::chunk_backward_workspace(params, family()));
  check_launch(a, cuda::chunk_backward(params, scratch.mutable_data_ptr(),
                                       c10::cuda::getCurrentCUDAStream(), family()));
}

void cuda_step(const DeltaRuleArguments& a, const StepParams& params) {
  check_dtype(a);
  const c10::cuda::CUDAGuard guard(a.q.device());
  check_launch(a, cuda::step(params, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace efla::ops

#else

namespace efla::ops {

at::Tensor cuda_forward(const DeltaRuleArguments& a, ForwardParams params, bool sequential) {
  TORCH_CHECK(false, a.op, ": this build has no CUDA kernels");
}
void cuda_backward(const DeltaRuleArguments& a, BackwardParams params, const at::Tensor& kept) {
  TORCH_CHECK(false, a.op, ": this build has no CUDA kernels");
}
void cuda_step(const DeltaRuleArguments& a, const StepParams& params) {
  TORCH_CHECK(false, a.op, ": this build has no CUDA kernels");
}

}  // namespace efla::ops

#endif
