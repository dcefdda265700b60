// The recurrence token by token over whole sequences: a task is one block of columns of the state
// of one (sequence, value head), small enough for L1, and walks the sequence in batches of tokens
// with the passes of step-inl.h. Columns do not exchange anything, so the split changes no bit.
#include "efla/kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/kernels/cpu/recurrent.cc"
#include <algorithm>

#include "efla/kernels/cpu/chunk_layout.h"
#include "efla/kernels/cpu/delta_rule.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h, as Highway asks:
#include "efla/kernels/cpu/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace {

// Tokens converted at a time.
constexpr int64_t kBatch = 32;
static_assert(kCheckpointTokens % kBatch == 0);

template <typename S>
void recurrent_block(const ForwardParams& params, int64_t n, int64_t head, int64_t first,
                     int64_t columns) {
  using A = Arithmetic<S>;
  const hn::ScalableTag<A> d;
  const Problem& p = params.problem;
  const Shape& s = p.shape;
  const int64_t key_dim = s.key_dim, key_stride = padded(key_dim), stride = padded(columns);
  const int64_t key_head = head / (s.value_heads / s.heads);
  const bool has_decay = p.log_decay.data != nullptr;
  const Span span = sequence_span(p, n);

  Scratch<A> state(key_dim * stride), keys(2 * kBatch * key_stride), values(kBatch * stride);
  StepScalars<A> scalars[kBatch];
  if (p.initial_state)
    load_state(static_cast<const A*>(p.initial_state) + state_offset(s, n, head), s, first, columns,
               state.get(), stride);

  StepTokens<A> tokens;
  tokens.key_dim = key_dim;
  tokens.q = keys.get();
  tokens.k = keys.get() + kBatch * key_stride;
  tokens.key_stride = key_stride;
  tokens.scalars = scalars;
  tokens.v = tokens.o = values.get();
  tokens.value_stride = stride;
  for (int64_t begin = span.begin; begin < span.end; begin += kBatch) {
    const int64_t offset = begin - span.begin;
    if (params.checkpoints && offset % kCheckpointTokens == 0) {
      const int64_t row = checkpoint_row(p, n) + offset / kCheckpointTokens;
      store_state(state.get(), stride, s, first, columns,
                  static_cast<A*>(params.checkpoints) + state_offset(s, row, head));
    }
    tokens.count = std::min(kBatch, span.end - begin);
    for (int64_t t = 0; t < tokens.count; ++t) {
      const int64_t token = begin + t;
      A* q = keys.get() + t * key_stride;
      A* k = q + kBatch * key_stride;
      load_key_row(d, at<S>(p.q, span.row, token, key_head), key_dim, p.qk_l2norm, A(p.scale), q);
      const KeyLength<A> length =
          load_key(d, p.rule, at<S>(p.k, span.row, token, key_head), key_dim, p.qk_l2norm, k);
      scalars[t] =
          step_scalars(d, p.rule, q, k, length, key_dim, *at<A>(p.beta, span.row, token, head),
                       has_decay, has_decay ? *at<A>(p.log_decay, span.row, token, head) : A(0));
      load_row(d, A(1), at<S>(p.v, span.row, token, head) + first, columns,
               values.get() + t * stride);
    }
    // Whole vectors: the padding is zero and stays so.
    step_block(d, tokens, state.get(), stride, stride);
    for (int64_t t = 0; t < tokens.count; ++t)
      store_row(d, A(1), values.get() + t * stride, columns,
                at<S>(params.o, span.row, begin + t, head) + first);
  }
  if (params.final_state)
    store_state(state.get(), stride, s, first, columns,
                static_cast<A*>(params.final_state) + state_offset(s, n, head));
}

void recurrent_task(const ForwardParams& params, int64_t n, int64_t head, int64_t first,
                    int64_t columns) {
  dispatch_storage(params.problem.dtype, [&](auto tag) {
    recurrent_block<decltype(tag)>(params, n, head, first, columns);
  });
}

}  // namespace
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {
namespace {
HWY_EXPORT(recurrent_task);
}  // namespace

void recurrent_forward(const ForwardParams& params, const Executor& executor) {
  const Problem& p = params.problem;
  const Shape& s = p.shape;
  dispatch_storage(p.dtype, [&](auto tag) {
    zero_outside<decltype(tag)>(p, params.o, s.value_heads, s.value_dim);
  });
  const int64_t heads = s.sequences * s.value_heads;
  if (heads == 0) return;
  constexpr int64_t kColumns = 64;
  const int64_t blocks = ceil_div(s.value_dim, kColumns);
  executor.parallel_for(heads * blocks, [&](int64_t task) {
    const int64_t head = task / blocks, first = task % blocks * kColumns;
    HWY_DYNAMIC_DISPATCH(recurrent_task)
    (params, head / s.value_heads, head % s.value_heads, first,
     std::min(kColumns, s.value_dim - first));
  });
}

}  // namespace efla::cpu
#endif  // HWY_ONCE
