// Checks of values that lie on a GPU, where looking at them would mean waiting: cu_seqlens is
// checked by a kernel, and what it finds is thrown by the next operator on that device that is
// called after the kernel ran, or by check_errors(). The call itself computes nothing then: o and
// all gradients are 0 and states pass through.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace efla::ops {

/// cu_seqlens on q's device. Offsets on the CPU beside a CUDA q have their values checked here, at
/// once, and are copied without waiting; during the capture of a CUDA graph they are refused.
std::optional<at::Tensor> offsets_beside(const char* op, const at::Tensor& q,
                                         const std::optional<at::Tensor>& cu_seqlens);

/// A contiguous int64 copy of CUDA offsets [N + 1] that is safe to use whatever they hold; op is a
/// literal. `tokens` bounds them. Behind them lie the N sequences' numbers, the longest first.
at::Tensor checked_offsets(const char* op, const at::Tensor& cu_seqlens, int64_t tokens);

/// Throws what a kernel on t's device has found so far; looks at host memory only. Nothing to do
/// for a CPU tensor.
void throw_pending_error(const at::Tensor& t);

/// Waits for every device that checked_offsets was used on and throws what was found.
void check_errors();

/// In debug mode (or with EFLA_DEBUG=1 in the environment) step_ waits for the device and checks
/// the values of state_indices before it changes anything; otherwise rows out of range are padding.
void set_debug(bool on);
bool debug_checks();

}  // namespace efla::ops
