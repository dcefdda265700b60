// Host side of the Hopper scan.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "efla/kernels/params.h"

namespace efla::cuda::sm90 {

/// Head sizes of these kernels: all multiples of 8 up to 128, K and V apart. They compute with
/// padded sizes; the copy engine fills the columns beyond the true ones with zeros and stores none.
constexpr bool has_kernel(const Shape& s) {
  const auto fits = [](int64_t dim) { return dim > 0 && dim <= 128 && dim % 8 == 0; };
  return fits(s.key_dim) && fits(s.value_dim);
}
constexpr int padded_dim(int64_t dim) { return dim <= 64 ? 64 : 128; }
/// K and V padded to one size: in the backward, and where sequences are split.
constexpr int square_dim(const Shape& s) { return padded_dim(std::max(s.key_dim, s.value_dim)); }

/// How a forward is spread over the multiprocessors.
struct ScanPlan {
  int value_tile = 128;     // columns of V per block; see plan_scan()
  int64_t part_tokens = 0;  // tokens per part of a split sequence; 0: whole sequences
  int64_t part_slots = 0;   // parts, those of no sequence included
};

/// Whether the kernels of this folder can run the problem on the current device: compute capability
/// 9.0, 16-bit storage, K and V multiples of 8 up to 128, and tensors whose rows start on 16-byte
/// boundaries.
bool scan_applies(const ForwardParams& params);

ScanPlan plan_scan(const Problem& problem);

/// Bytes of workspace that the split of backward() needs under the plan, and of scan_forward(), to
/// which checkpoints are given or not.
int64_t parts_workspace(const Problem& problem, const ScanPlan& plan);
int64_t scan_workspace(const Problem& problem, const ScanPlan& plan, bool checkpoints = false);

/// Bytes of what scan_forward() can leave for backward() under the plan: the transition of each
/// part and the state before it. 0 where sequences are not split.
int64_t checkpoint_bytes(const Problem& problem, const ScanPlan& plan);

/// Chunkwise forward of a problem to which scan_applies(); slack rows of o are the caller's.
/// params.checkpoints has checkpoint_bytes() or is null.
cudaError_t scan_forward(const ForwardParams& params, const ScanPlan& plan, void* workspace,
                         cudaStream_t stream);

}  // namespace efla::cuda::sm90
