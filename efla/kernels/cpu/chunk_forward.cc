// Chunkwise forward. Per chunk of one value head, with S the state before it (docs/mathematics.md,
// "Chunkwise form"):
//
//   (I + L) U = diag(w) V - diag(e exp(G)) K S ,   O = scale diag(exp(G)) Q S + P U ,
//   S <- exp(G_C) S + (diag(exp(G_C - G)) K)^T U .
//
// Columns of V, U, S, O are independent, so a task is one block of columns of one (sequence, value
// head); the triangular system is solved directly, without an inverse.
#include "efla/kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/kernels/cpu/chunk_forward.cc"
#include <algorithm>

#include "efla/kernels/cpu/chunk_layout.h"
#include "efla/kernels/cpu/delta_rule.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h, as Highway asks:
#include "efla/kernels/cpu/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace {

/// Columns [first, first + columns) of sequence n, value head `head`.
template <typename S>
void forward_block(const ForwardParams& params, int64_t n, int64_t head, int64_t first,
                   int64_t columns) {
  using A = Arithmetic<S>;
  const hn::ScalableTag<A> d;
  const Problem& p = params.problem;
  const Shape& s = p.shape;
  const int64_t key_dim = s.key_dim, stride = padded(columns);
  const bool erasing = erases(p.rule);
  const Span span = sequence_span(p, n);

  Scratch<A> state_memory(key_dim * stride), value_memory(2 * kChunk * stride);
  A* state = state_memory.get();
  if (p.initial_state)
    load_state(static_cast<const A*>(p.initial_state) + state_offset(s, n, head), s, first, columns,
               state, stride);

  Chunk<S> chunk(p);
  for (int64_t token = span.begin; token < span.end; token += kChunk) {
    const int64_t offset = token - span.begin;
    if (params.checkpoints && offset % kCheckpointTokens == 0) {
      const int64_t row = checkpoint_row(p, n) + offset / kCheckpointTokens;
      store_state(state, stride, s, first, columns,
                  static_cast<A*>(params.checkpoints) + state_offset(s, row, head));
    }
    const int64_t size = std::min(kChunk, span.end - token);
    chunk.load(span.row, token, size, head, /*queries=*/true);

    A* o = value_memory.get();  // [size, columns]
    A* u = o + size * stride;   // [size, columns]: the right-hand side, then U
    std::fill_n(o, size * stride, A(0));
    for (int64_t t = 0; t < size; ++t)
      load_row(d, chunk.coefficients(t).write, at<S>(p.v, span.row, token + t, head) + first,
               columns, u + t * stride);
    gemm(d, Part::kAll, erasing ? 2 * size : size, columns, key_dim,
         rows_of(chunk.state_rows(), chunk.stride()), state, stride, o, stride, A(1));
    if (erasing) solve_lower(d, size, columns, chunk.minus_l(), kChunk, u, stride);
    gemm(d, Part::kLowerLeft, size, columns, size, rows_of(chunk.p(), kChunk), u, stride, o, stride,
         A(1));
    gemm(d, Part::kAll, key_dim, columns, size, columns_of(chunk.tail_keys(), chunk.stride()), u,
         stride, state, stride, chunk.decay());
    for (int64_t t = 0; t < size; ++t)
      store_row(d, A(1), o + t * stride, columns,
                at<S>(params.o, span.row, token + t, head) + first);
  }
  if (params.final_state)
    store_state(state, stride, s, first, columns,
                static_cast<A*>(params.final_state) + state_offset(s, n, head));
}

void forward_task(const ForwardParams& params, int64_t n, int64_t head, int64_t first,
                  int64_t columns) {
  dispatch_storage(params.problem.dtype, [&](auto tag) {
    forward_block<decltype(tag)>(params, n, head, first, columns);
  });
}

}  // namespace
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {
namespace {
HWY_EXPORT(forward_task);
}  // namespace

void chunk_forward(const ForwardParams& params, const Executor& executor) {
  const Problem& p = params.problem;
  const Shape& s = p.shape;
  dispatch_storage(p.dtype, [&](auto tag) {
    zero_outside<decltype(tag)>(p, params.o, s.value_heads, s.value_dim);
  });
  const int64_t heads = s.sequences * s.value_heads;
  if (heads == 0) return;
  const ValueSplit split = split_values(s, p.dtype, heads, executor.threads);
  executor.parallel_for(heads * split.blocks, [&](int64_t task) {
    const int64_t head = task / split.blocks, first = task % split.blocks * split.width;
    HWY_DYNAMIC_DISPATCH(forward_task)
    (params, head / s.value_heads, head % s.value_heads, first,
     std::min(split.width, s.value_dim - first));
  });
}

}  // namespace efla::cpu
#endif  // HWY_ONCE
