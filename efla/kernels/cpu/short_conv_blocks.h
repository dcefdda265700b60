// How the short convolution cuts its work: blocks of consecutive tokens of one sequence, and the
// rows a block reads before its first token (ShortConvParams in layer_ops.h has the layouts).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "efla/kernels/cpu/layer_ops.h"
#include "efla/kernels/cpu/storage.h"

namespace efla::cpu {

/// Tokens [begin, end) of a sequence, counted from its start.
struct ConvBlock {
  int64_t sequence = 0;
  int64_t row = 0;     // row of the batch that holds the sequence
  int64_t first = 0;   // the sequence's first token in that row
  int64_t length = 0;  // of the sequence
  int64_t begin = 0, end = 0;
};

/// The blocks of every sequence in order; an empty sequence has one empty block, which carries its
/// states through.
inline std::vector<ConvBlock> conv_blocks(const ShortConvParams& p, int64_t block_tokens) {
  std::vector<ConvBlock> blocks;
  for (int64_t n = 0; n < p.sequences; ++n) {
    ConvBlock b;
    b.sequence = n;
    b.row = p.cu_seqlens ? 0 : n;
    b.first = p.cu_seqlens ? p.cu_seqlens[n] : 0;
    b.length = p.cu_seqlens ? p.cu_seqlens[n + 1] - p.cu_seqlens[n] : p.tokens;
    do {
      b.end = std::min(b.begin + block_tokens, b.length);
      blocks.push_back(b);
      b.begin = b.end;
    } while (b.begin < b.length);
  }
  return blocks;
}

/// The row of `view` that holds token t of the block's sequence.
template <typename S>
const S* conv_row(const View& view, const ConvBlock& b, int64_t t) {
  return at<S>(view, b.row, b.first + t, 0);
}
template <typename S>
S* conv_row(const MutableView& view, const ConvBlock& b, int64_t t) {
  return at<S>(view, b.row, b.first + t, 0);
}

/// Zeroes the rows of `y` that no sequence covers.
inline void zero_uncovered_rows(const ShortConvParams& p, const MutableView& y) {
  if (p.cu_seqlens == nullptr || y.data == nullptr) return;
  const int64_t first = p.sequences > 0 ? p.cu_seqlens[0] : p.tokens;
  const int64_t last = p.sequences > 0 ? p.cu_seqlens[p.sequences] : p.tokens;
  const int64_t size = p.dtype == DType::kFloat64 ? 8 : p.dtype == DType::kFloat32 ? 4 : 2;
  for (int64_t t = 0; t < p.tokens; ++t)
    if (t < first || t >= last)
      std::memset(static_cast<char*>(y.data) + t * y.token * size, 0, p.channels * size);
}

}  // namespace efla::cpu
