// Checks of values that lie in device memory, without waiting for the device: a kernel looks, keeps
// what it finds in host memory, and makes the values harmless. Capturable in a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace efla::cuda {

/// So many sequences are sorted; each counts those before it.
inline constexpr int64_t kSortedSequences = 256;

/// What a check found. Lies in pinned host memory; the device writes it when found == 0, the host
/// sets found back to 0 once it has read it. `found` is written last.
struct CheckRecord {
  int32_t found = 0;
  int64_t index = 0;     // the first offset that is wrong,
  int64_t value = 0;     // what it is,
  int64_t previous = 0;  // the one before it (0 for the first),
  int64_t tokens = 0;    // T
  const char* op = "";   // a literal of the host
};

/// Copies `count` offsets (int64 if wide, else int32; stride in elements) to checked [count] if
/// they do not decrease and lie in [0, tokens]. Otherwise fills checked with 0, so that every
/// sequence is empty, and notes the first that is wrong in *record (visible to host and device).
/// longest_first [count - 1], if not null, gets the numbers of the sequences by length, equally
/// long ones (and more than kSortedSequences) as they lie.
cudaError_t check_offsets(const void* offsets, bool wide, int64_t stride, int64_t count,
                          int64_t tokens, const char* op, int64_t* checked, int64_t* longest_first,
                          CheckRecord* record, cudaStream_t stream);

}  // namespace efla::cuda
