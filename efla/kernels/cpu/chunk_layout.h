// Where things lie for the chunkwise kernels: sequences, checkpoints, the split of the value
// dimension, scratch memory. Nothing here depends on the instruction set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "efla/kernels/cpu/storage.h"
#include "efla/kernels/params.h"
#include "hwy/aligned_allocator.h"

namespace efla::cpu {

/// Tokens per chunk. A longer chunk does more work inside the chunk, a shorter one streams the
/// state more often.
inline constexpr int64_t kChunk = 32;
// A state is kept for backward only where a chunk begins.
static_assert(kCheckpointTokens % kChunk == 0);
/// Rows of scratch matrices are padded to this many elements: whole vectors on every target.
inline constexpr int64_t kPad = 16;

inline int64_t padded(int64_t n) { return (n + kPad - 1) / kPad * kPad; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Tokens [begin, end) of batch row `row`.
struct Span {
  int64_t row;
  int64_t begin;
  int64_t end;
  int64_t size() const { return end - begin; }
};

inline Span sequence_span(const Problem& p, int64_t n) {
  if (p.cu_seqlens) return {0, p.cu_seqlens[n], p.cu_seqlens[n + 1]};
  return {n, 0, p.shape.tokens};
}

/// First row of the sequence in the checkpoint tensor (see checkpoint_rows).
inline int64_t checkpoint_row(const Problem& p, int64_t n) {
  if (p.cu_seqlens) return n + p.cu_seqlens[n] / kCheckpointTokens;
  return n * ceil_div(p.shape.tokens, kCheckpointTokens);
}

/// Offset of state [row, head] in a tensor [rows, HV, K, V].
inline int64_t state_offset(const Shape& s, int64_t row, int64_t head) {
  return (row * s.value_heads + head) * s.key_dim * s.value_dim;
}

/// Copies columns [first, first + columns) of a state [K, V] into a block [K, stride] and back.
template <typename A>
void load_state(const A* state, const Shape& s, int64_t first, int64_t columns, A* block,
                int64_t stride) {
  for (int64_t i = 0; i < s.key_dim; ++i)
    std::copy_n(state + i * s.value_dim + first, columns, block + i * stride);
}
template <typename A>
void store_state(const A* block, int64_t stride, const Shape& s, int64_t first, int64_t columns,
                 A* state) {
  for (int64_t i = 0; i < s.key_dim; ++i)
    std::copy_n(block + i * stride, columns, state + i * s.value_dim + first);
}

/// Zeroes the rows of `view` that belong to no sequence; a null view is skipped.
template <typename S>
void zero_outside(const Problem& p, const MutableView& view, int64_t heads, int64_t dim) {
  if (!view.data || !p.cu_seqlens) return;
  const auto zero = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t h = 0; h < heads; ++h)
        std::memset(at<S>(view, 0, t, h), 0, static_cast<size_t>(dim) * sizeof(S));
  };
  zero(0, p.cu_seqlens[0]);
  zero(p.cu_seqlens[p.shape.sequences], p.shape.tokens);
}

/// The value dimension in `blocks` blocks of `width` columns (the last may be narrower).
struct ValueSplit {
  int64_t width;
  int64_t blocks;
};

/// Blocks whose state stays in L2, and enough of them for `tasks` tasks if V allows. `heads` is the
/// number of independent (sequence, value head) pairs.
inline ValueSplit split_values(const Shape& s, DType dtype, int64_t heads, int64_t tasks) {
  constexpr int64_t kStateBytes = 256 * 1024, kNarrowest = 32;
  const int64_t column_bytes = s.key_dim * (dtype == DType::kFloat64 ? 8 : 4);
  const int64_t widest = std::max(kNarrowest, kStateBytes / column_bytes);
  const int64_t wanted = std::max(ceil_div(s.value_dim, widest), ceil_div(tasks, heads));
  const int64_t blocks = std::clamp<int64_t>(wanted, 1, ceil_div(s.value_dim, kNarrowest));
  const int64_t width = ceil_div(ceil_div(s.value_dim, blocks), kNarrowest) * kNarrowest;
  return {width, ceil_div(s.value_dim, width)};
}

/// A zeroed, vector-aligned array.
template <typename A>
class Scratch {
 public:
  explicit Scratch(int64_t size)
      : data_(hwy::AllocateAligned<A>(static_cast<size_t>(std::max<int64_t>(size, 1)))) {
    std::memset(data_.get(), 0, static_cast<size_t>(size) * sizeof(A));
  }
  A* get() const { return data_.get(); }

 private:
  hwy::AlignedFreeUniquePtr<A[]> data_;
};

}  // namespace efla::cpu
