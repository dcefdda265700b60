// Small helpers that every operator shares: optional tensors, dtypes, calls through the dispatcher,
// and the guards against derivatives that do not exist.
#pragma once

#include <torch/torch.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "efla/kernels/params.h"

namespace efla::ops {

/// The tensor if it is given and defined, else null.
inline const at::Tensor* given(const std::optional<at::Tensor>& t) {
  return t.has_value() && t->defined() ? &*t : nullptr;
}

/// The reverse: no tensor if it is undefined.
inline std::optional<at::Tensor> as_optional(const at::Tensor& t) {
  return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt;
}

/// The registered operator of that name. Callers keep it: finding it takes a lock and a hash.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

inline bool is_supported(at::ScalarType t) {
  return t == at::kFloat || t == at::kDouble || t == at::kBFloat16 || t == at::kHalf;
}

/// The dtype in which CPU kernels read and write: float16 is widened to a float32 copy.
inline at::ScalarType storage_type(at::ScalarType t) { return t == at::kHalf ? at::kFloat : t; }

/// The dtype in which the kernels of t's device read and write it.
inline at::ScalarType storage_type(const at::Tensor& t) {
  return t.is_cuda() ? t.scalar_type() : storage_type(t.scalar_type());
}

/// The dtype of states and per-token scalars.
inline at::ScalarType arithmetic_type(at::ScalarType t) {
  return t == at::kDouble ? at::kDouble : at::kFloat;
}

/// `storage` is one of storage_type()'s results, or on a GPU any supported dtype.
inline DType kernel_dtype(at::ScalarType storage) {
  if (storage == at::kDouble) return DType::kFloat64;
  if (storage == at::kHalf) return DType::kFloat16;
  return storage == at::kBFloat16 ? DType::kBFloat16 : DType::kFloat32;
}

/// t itself if it has the dtype already (no dispatch), else a copy.
inline at::Tensor as_dtype(const at::Tensor& t, at::ScalarType dtype) {
  return t.scalar_type() == dtype ? t : t.to(dtype);
}

/// t itself if its last dimension is contiguous, else a contiguous copy.
inline at::Tensor with_contiguous_rows(const at::Tensor& t) {
  return t.dim() == 0 || t.size(-1) <= 1 || t.stride(-1) == 1 ? t : t.contiguous();
}

/// As with_contiguous_rows; on a GPU also a copy if the rows hold whole 16-byte pieces but do not
/// start on 16-byte boundaries, where the fast kernels could not read them.
at::Tensor with_readable_rows(const at::Tensor& t);

inline at::Tensor contiguous(const at::Tensor& t, at::ScalarType dtype) {
  return as_dtype(t, dtype).contiguous();
}

/// An output that was not asked for (schemas cannot return optional tensors).
inline at::Tensor absent_like(const at::Tensor& t) { return at::empty({0}, t.options()); }

/// The tensor, or undefined if it is the placeholder of absent_like().
inline at::Tensor or_undefined(const at::Tensor& t, bool wanted) {
  return wanted ? t : at::Tensor();
}

/// Checks that the tensor is on a device that this build has kernels for, and on q's.
void check_device(const char* op, const at::Tensor& first, const char* name,
                  const at::Tensor& tensor);

/// Refuses a dual tensor of forward-mode differentiation, whose tangent would be lost.
void check_no_tangent(const char* op, const at::Tensor& tensor);

/// True if autograd must record an operator on these tensors (null ones are left out). Throws if
/// one of them is a dual tensor.
bool needs_grad(const char* op, std::initializer_list<const at::Tensor*> tensors);

/// Marks the results of a backward pass: differentiating them again fails and says so.
torch::autograd::variable_list once_differentiable(const char* op,
                                                   torch::autograd::variable_list gradients);

/// Reads cu_seqlens ([N + 1], int32 or int64, host) and checks that the offsets do not decrease and
/// lie in [0, tokens].
std::vector<int64_t> read_offsets(const char* op, const at::Tensor& cu_seqlens, int64_t tokens);

/// Checks the dtype and the dimensions of cu_seqlens and that the batch is 1.
void check_cu_seqlens(const char* op, const at::Tensor& cu_seqlens, const at::Tensor& batched,
                      const char* name);

}  // namespace efla::ops
