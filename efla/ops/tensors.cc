#include "efla/ops/tensors.h"

#include <torch/csrc/autograd/functions/basic_ops.h>

namespace efla::ops {

void check_device(const char* op, const at::Tensor& first, const char* name,
                  const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == first.device().type() &&
                  tensor.device().index() == first.device().index(),
              op, ": ", name, " is on ", tensor.device(), " but the first argument is on ",
              first.device(), "; all tensors must be on one device (", name, " has shape ",
              tensor.sym_sizes(), ")");
  const auto type = tensor.device().type();
#ifdef EFLA_CUDA
  const bool cuda = type == at::kCUDA;
#else
  const bool cuda = false;
#endif
  TORCH_CHECK(
      type == at::kCPU || type == at::kMeta || cuda, op, ": ", name, " is on ", tensor.device(),
      ", but this build of EFLA has no kernels for that device; move the tensors to the CPU");
}

at::Tensor with_readable_rows(const at::Tensor& t) {
  at::Tensor rows = with_contiguous_rows(t);
  if (!rows.is_cuda() || rows.dim() == 0) return rows;
  const int64_t piece = 16 / rows.element_size();
  if (rows.size(-1) % piece != 0) return rows;
  bool aligned = reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % 16 == 0;
  for (int64_t i = 0; i + 1 < rows.dim(); ++i) {  // an expanded dimension has stride 0
    aligned = aligned && rows.stride(i) % piece == 0 && (rows.stride(i) > 0 || rows.size(i) <= 1);
  }
  return aligned ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

void check_no_tangent(const char* op, const at::Tensor& tensor) {
  TORCH_CHECK(!tensor._fw_grad(/*level=*/0).defined() ||
                  !c10::AutogradState::get_tls_state().get_fw_grad_mode(),
              op, ": forward-mode differentiation is not implemented, but an argument of shape ",
              tensor.sym_sizes(),
              " is a dual tensor; use reverse mode (backward, torch.func.grad or torch.func.vjp)");
}

bool needs_grad(const char* op, std::initializer_list<const at::Tensor*> tensors) {
  for (const at::Tensor* t : tensors) {
    if (t != nullptr) check_no_tangent(op, *t);
  }
  if (!at::GradMode::is_enabled()) return false;
  for (const at::Tensor* t : tensors) {
    if (t != nullptr && t->requires_grad()) return true;
  }
  return false;
}

torch::autograd::variable_list once_differentiable(const char* op,
                                                   torch::autograd::variable_list gradients) {
  if (!at::GradMode::is_enabled()) return gradients;  // not create_graph: nothing to guard
  for (at::Tensor& g : gradients) {
    if (g.defined()) g = g.detach().requires_grad_(true);
  }
  auto error = std::make_shared<torch::autograd::DelayedError>(
      std::string(op) + ": second derivatives are not implemented",
      static_cast<int64_t>(gradients.size()));
  return (*error)(std::move(gradients));
}

std::vector<int64_t> read_offsets(const char* op, const at::Tensor& cu_seqlens, int64_t tokens) {
  const int64_t count = cu_seqlens.size(0);
  const int64_t stride = cu_seqlens.stride(0);
  std::vector<int64_t> offsets(static_cast<size_t>(count));
  int64_t previous = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t offset = cu_seqlens.scalar_type() == at::kInt
                               ? cu_seqlens.const_data_ptr<int32_t>()[i * stride]
                               : cu_seqlens.const_data_ptr<int64_t>()[i * stride];
    TORCH_CHECK(offset >= previous && offset <= tokens, op,
                ": cu_seqlens must not decrease and must lie in [0, T = ", tokens,
                "], but cu_seqlens[", i, "] = ", offset,
                i == 0 ? std::string() : " after " + std::to_string(previous),
                " (cu_seqlens has shape ", cu_seqlens.sizes(), ")");
    offsets[static_cast<size_t>(i)] = offset;
    previous = offset;
  }
  return offsets;
}

void check_cu_seqlens(const char* op, const at::Tensor& cu_seqlens, const at::Tensor& batched,
                      const char* name) {
  TORCH_CHECK(cu_seqlens.scalar_type() == at::kInt || cu_seqlens.scalar_type() == at::kLong, op,
              ": cu_seqlens must be int32 or int64, but is ", cu_seqlens.scalar_type(),
              " with shape ", cu_seqlens.sym_sizes());
  TORCH_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.sym_size(0) >= 1, op,
              ": cu_seqlens must have shape [N + 1] with N >= 0, but has shape ",
              cu_seqlens.sym_sizes());
  TORCH_CHECK(batched.sym_size(0) == 1, op,
              ": with cu_seqlens the batch must be 1 (sequences packed along T), but ", name,
              " has shape ", batched.sym_sizes());
}

}  // namespace efla::ops
