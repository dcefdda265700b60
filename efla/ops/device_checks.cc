#include "efla/ops/device_checks.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <atomic>
#include <cstdlib>
#include <string_view>

#include "efla/ops/tensors.h"

#ifdef EFLA_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <mutex>
#include <string>

#include "efla/kernels/cuda/checks.h"
#endif

namespace efla::ops {
namespace {

std::atomic<bool>& debug_flag() {
  static std::atomic<bool> flag = [] {
    const char* value = std::getenv("EFLA_DEBUG");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return flag;
}

}  // namespace

void set_debug(bool on) { debug_flag() = on; }

#ifdef EFLA_CUDA

namespace {

constexpr int kMaxDevices = 64;
constexpr const char* kChecks = "efla::check_errors";

void check_cuda(cudaError_t error) {
  TORCH_CHECK(error == cudaSuccess, kChecks, ": ", cudaGetErrorString(error));
}

bool capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

// One record a device, made when first needed and kept until the process ends: captured graphs hold
// its address.
std::array<std::atomic<cuda::CheckRecord*>, kMaxDevices> records;

cuda::CheckRecord* record_of(int device) {
  TORCH_CHECK(device >= 0 && device < kMaxDevices, kChecks, ": device index ", device,
              " is beyond the ", kMaxDevices, " that are provided for");
  cuda::CheckRecord* record = records[device].load(std::memory_order_acquire);
  if (record != nullptr) return record;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  record = records[device].load(std::memory_order_acquire);
  if (record != nullptr) return record;
  // An allocation is allowed in a capture only if the thread says that it knows.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check_cuda(cudaThreadExchangeStreamCaptureMode(&mode));
  void* memory = nullptr;
  const cudaError_t error = cudaHostAlloc(&memory, sizeof(cuda::CheckRecord),
                                          cudaHostAllocMapped | cudaHostAllocPortable);
  check_cuda(cudaThreadExchangeStreamCaptureMode(&mode));
  check_cuda(error);
  record = new (memory) cuda::CheckRecord();
  records[device].store(record, std::memory_order_release);
  return record;
}

void throw_found(int device) {
  cuda::CheckRecord* record = records[device].load(std::memory_order_acquire);
  if (record == nullptr || __atomic_load_n(&record->found, __ATOMIC_ACQUIRE) == 0) return;
  const cuda::CheckRecord copy = *record;
  __atomic_store_n(&record->found, 0, __ATOMIC_RELEASE);
  const std::string after =
      copy.index == 0 ? std::string() : " after " + std::to_string(copy.previous);
  TORCH_CHECK(false, copy.op, " (an earlier call on cuda:", device,
              "): cu_seqlens must not decrease and must lie in [0, T = ", copy.tokens,
              "], but cu_seqlens[", copy.index, "] = ", copy.value, after,
              "; that call gave zeros and passed its states through");
}

}  // namespace

std::optional<at::Tensor> offsets_beside(const char* op, const at::Tensor& q,
                                         const std::optional<at::Tensor>& cu_seqlens) {
  const at::Tensor* offsets = given(cu_seqlens);
  if (offsets == nullptr || !q.is_cuda() || !offsets->is_cpu() || q.dim() < 2) return cu_seqlens;
  check_cu_seqlens(op, *offsets, q, "q");
  // torch.compile's fake tensors hold no values.
  if (at::isTensorSubclassLike(*offsets) || at::isTensorSubclassLike(q)) {
    return offsets->to(q.device());
  }
  read_offsets(op, *offsets, q.size(1));
  const c10::cuda::CUDAGuard guard(q.device());
  TORCH_CHECK(!capturing(), op, ": cu_seqlens is on the CPU (shape ", offsets->sizes(),
              "), from where a CUDA graph would copy the same values for ever; pass it on ",
              q.device());
  return contiguous(*offsets, at::kLong).pin_memory().to(q.device(), /*non_blocking=*/true);
}

at::Tensor checked_offsets(const char* op, const at::Tensor& cu_seqlens, int64_t tokens) {
  const c10::cuda::CUDAGuard guard(cu_seqlens.device());
  const int64_t count = cu_seqlens.size(0);
  at::Tensor checked = at::empty({2 * count - 1}, cu_seqlens.options().dtype(at::kLong));
  auto* out = checked.mutable_data_ptr<int64_t>();
  check_cuda(cuda::check_offsets(cu_seqlens.const_data_ptr(), cu_seqlens.scalar_type() == at::kLong,
                                 cu_seqlens.stride(0), count, tokens, op, out, out + count,
                                 record_of(cu_seqlens.get_device()),
                                 c10::cuda::getCurrentCUDAStream()));
  return checked;
}

void throw_pending_error(const at::Tensor& t) {
  if (t.is_cuda()) throw_found(t.get_device());
}

void check_errors() {
  for (int device = 0; device < kMaxDevices; ++device) {
    if (records[device].load(std::memory_order_acquire) == nullptr) continue;
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    check_cuda(cudaDeviceSynchronize());
    throw_found(device);
  }
}

bool debug_checks() { return debug_flag() && !capturing(); }

#else

std::optional<at::Tensor> offsets_beside(const char* op, const at::Tensor& q,
                                         const std::optional<at::Tensor>& cu_seqlens) {
  return cu_seqlens;
}
at::Tensor checked_offsets(const char* op, const at::Tensor& cu_seqlens, int64_t tokens) {
  TORCH_CHECK(false, op, ": this build has no CUDA kernels");
}
void throw_pending_error(const at::Tensor& t) {}
void check_errors() {}
bool debug_checks() { return debug_flag(); }

#endif

}  // namespace efla::ops

// Operators without a tensor: one function for every backend.
TORCH_LIBRARY_FRAGMENT(efla, m) {
  m.def("check_errors() -> ()", efla::ops::check_errors);
  m.def("set_debug(bool on) -> ()", efla::ops::set_debug);
}
