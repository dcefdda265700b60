// Chunkwise backward. Forward kept the state before every 512th token; the 512 tokens in between
// (a segment) are walked forward once more to rebuild states and U, then backward chunk by chunk.
//
// The work of one (sequence, key head) is a list of units: one block of value columns of one of the
// value heads that read this key head. Where there are fewer (sequence, key head) pairs than
// threads the list is cut into parts; each part then adds up its own gradients of q, k and the
// scalars, and a second pass sums the parts in a fixed order.
#include "efla/kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/kernels/cpu/chunk_backward.cc"
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "efla/kernels/cpu/chunk_layout.h"
#include "efla/kernels/cpu/delta_rule.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h, as Highway asks:
#include "efla/kernels/cpu/chunk_backward-inl.h"

#ifndef EFLA_KERNELS_CPU_CHUNK_BACKWARD_PLAN_
#define EFLA_KERNELS_CPU_CHUNK_BACKWARD_PLAN_
namespace efla::cpu {

// How the work of chunk_backward is cut.
struct BackwardPlan {
  ValueSplit values;
  int64_t group;  // value heads per key head
  int64_t parts;  // per (sequence, key head)
  int64_t units() const { return group * values.blocks; }
};

// The sums of one part over `rows` tokens, in one array of the arithmetic type:
// dq [rows, padded K], dk [rows, padded K], then de, dw, dg [group, rows] each.
template <typename A>
struct PartSums {
  A* data;
  int64_t rows;
  int64_t key_stride;
  int64_t group;

  static int64_t size(int64_t rows, int64_t key_stride, int64_t group) {
    return rows * (2 * key_stride + 3 * group);
  }
  A* q(int64_t t) const { return data + t * key_stride; }
  A* k(int64_t t) const { return data + (rows + t) * key_stride; }
  A* scalar(int which, int64_t head, int64_t t) const {
    return data + 2 * rows * key_stride + (which * group + head) * rows + t;
  }
};

}  // namespace efla::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace {

/// One unit inside one segment: rebuilds the chunk states, then walks back.
template <typename S>
class SegmentBackward {
 public:
  using A = Arithmetic<S>;
  using D = hn::ScalableTag<A>;

  SegmentBackward(const BackwardParams& params, const Span& span, int64_t columns)
      : params_(params),
        span_(span),
        key_dim_(params.problem.shape.key_dim),
        columns_(columns),
        stride_(padded(columns)),
        saved_size_(columns * padded(key_dim_)),
        chunk_(params.problem),
        backward_(params.problem, columns),
        state_(key_dim_ * stride_),
        u_(std::min(padded(span.size()), kCheckpointTokens) * stride_),
        saved_(std::min(ceil_div(span.size(), kChunk), kCheckpointTokens / kChunk) * saved_size_) {}

  /// Tokens [begin, end) of the batch row for value head `head`, columns from `first`, starting
  /// from the state in `checkpoint`. `sums(t)` says where gradients of token t are added.
  template <typename Sums>
  void run(int64_t begin, int64_t end, int64_t head, int64_t first, const A* checkpoint,
           A* grad_state, const Sums& sums) {
    load_state(checkpoint, params_.problem.shape, first, columns_, state_.get(), stride_);
    const int64_t chunks = ceil_div(end - begin, kChunk);
    for (int64_t c = 0; c < chunks; ++c) rebuild(begin, end, head, first, c, c + 1 == chunks);
    for (int64_t c = chunks - 1; c >= 0; --c) {
      const int64_t token = begin + c * kChunk, size = std::min(kChunk, end - token);
      chunk_.load(span_.row, token, size, head, /*queries=*/true);
      for (int64_t t = 0; t < size; ++t)
        load_row(D(), A(1), at<S>(params_.grad_o, span_.row, token + t, head) + first, columns_,
                 backward_.grad_o() + t * stride_);
      const KeyGradients<A> out = sums(token);
      backward_.run(chunk_, u_.get() + c * kChunk * stride_, saved_.get() + c * saved_size_,
                    grad_state, out);
      write_values(token, head, first, out);
    }
  }

 private:
  // S0^T and U of chunk c, and the state after it unless it is the last.
  void rebuild(int64_t begin, int64_t end, int64_t head, int64_t first, int64_t c, bool last) {
    const D d;
    const Problem& p = params_.problem;
    const int64_t token = begin + c * kChunk, size = std::min(kChunk, end - token);
    transpose(key_dim_, columns_, state_.get(), stride_, saved_.get() + c * saved_size_,
              padded(key_dim_));
    chunk_.load(span_.row, token, size, head, /*queries=*/false);
    A* u = u_.get() + c * kChunk * stride_;
    for (int64_t t = 0; t < size; ++t)
      load_row(d, chunk_.coefficients(t).write, at<S>(p.v, span_.row, token + t, head) + first,
               columns_, u + t * stride_);
    if (erases(p.rule)) {
      gemm(d, Part::kAll, size, columns_, key_dim_,
           rows_of(chunk_.minus_erase_rows(), chunk_.stride()), state_.get(), stride_, u, stride_,
           A(1));
      solve_lower(d, size, columns_, chunk_.minus_l(), kChunk, u, stride_);
    }
    if (!last)
      gemm(d, Part::kAll, key_dim_, columns_, size, columns_of(chunk_.tail_keys(), chunk_.stride()),
           u, stride_, state_.get(), stride_, chunk_.decay());
  }

  // dV = diag(w) dR and dw_t = dR_t . v_t.
  void write_values(int64_t token, int64_t head, int64_t first, const KeyGradients<A>& out) {
    const D d;
    const int64_t lanes = hn::Lanes(d);
    for (int64_t t = 0; t < chunk_.size(); ++t) {
      const A* grad_r = backward_.grad_r(chunk_) + t * stride_;
      const S* v = at<S>(params_.problem.v, span_.row, token + t, head) + first;
      auto sum = hn::Zero(d);
      for (int64_t j = 0; j < columns_; j += lanes)
        sum = hn::MulAdd(load_some(d, v + j, HWY_MIN(lanes, columns_ - j)), hn::Load(d, grad_r + j),
                         sum);
      out.write[t] += hn::GetLane(hn::SumOfLanes(d, sum));
      if (params_.grad_v.data)
        store_row(d, chunk_.coefficients(t).write, grad_r, columns_,
                  at<S>(params_.grad_v, span_.row, token + t, head) + first);
    }
  }

  const BackwardParams& params_;
  const Span span_;
  const int64_t key_dim_, columns_, stride_, saved_size_;
  Chunk<S> chunk_;
  ChunkBackward<S> backward_;
  Scratch<A> state_;  // [K, columns]
  Scratch<A> u_;      // [segment, columns]
  Scratch<A> saved_;  // [chunks of a segment, columns, padded K]
};

/// From the sums of all parts to the gradients of tokens [first, first + count) of one (sequence,
/// key head): sums, the step rule's chain rule, lambda = |k|^2, the l2 norm, storage type. Row 0 of
/// `parts` is token `base`.
template <typename S>
class Finish {
 public:
  using A = Arithmetic<S>;
  using D = hn::ScalableTag<A>;

  Finish(const BackwardParams& params, int64_t group)
      : params_(params), group_(group), memory_(4 * padded(params.problem.shape.key_dim)) {}

  void run(int64_t row, int64_t key_head, int64_t first, int64_t count, int64_t base,
           const std::vector<PartSums<A>>& parts) {
    const Problem& p = params_.problem;
    const int64_t n = p.shape.key_dim, stride = padded(n);
    A *x = memory_.get(), *k = x + stride, *grad = k + stride;
    for (int64_t token = first; token < first + count; ++token) {
      const int64_t t = token - base;
      const KeyLength<A> length =
          load_key(D(), p.rule, at<S>(p.k, row, token, key_head), n, p.qk_l2norm, k);
      const A grad_lambda = scalars(row, token, key_head, t, length, parts);
      if (params_.grad_k.data) {
        add(
            parts, [&](const PartSums<A>& s) { return s.k(t); }, grad);
        for (int64_t i = 0; i < n; ++i) grad[i] += 2 * grad_lambda * k[i];
        if (p.qk_l2norm) l2norm_backward(at<S>(p.k, row, token, key_head), x, grad);
        store_row(D(), A(1) / length.unit, grad, n, at<S>(params_.grad_k, row, token, key_head));
      }
      if (params_.grad_q.data) {
        add(
            parts, [&](const PartSums<A>& s) { return s.q(t); }, grad);
        if (p.qk_l2norm) l2norm_backward(at<S>(p.q, row, token, key_head), x, grad);
        store_row(D(), A(1), grad, n, at<S>(params_.grad_q, row, token, key_head));
      }
    }
  }

 private:
  template <typename Row>
  void add(const std::vector<PartSums<A>>& parts, const Row& row, A* sum) {
    const D d;
    const int64_t lanes = hn::Lanes(d), n = padded(params_.problem.shape.key_dim);
    for (int64_t i = 0; i < n; i += lanes) {
      auto total = hn::Load(d, row(parts[0]) + i);
      for (size_t part = 1; part < parts.size(); ++part)
        total = hn::Add(total, hn::Load(d, row(parts[part]) + i));
      hn::Store(total, d, sum + i);
    }
  }

  // Writes the gradients of beta and log_decay; returns that of lambda, summed over value heads.
  A scalars(int64_t row, int64_t token, int64_t key_head, int64_t t, KeyLength<A> length,
            const std::vector<PartSums<A>>& parts) {
    const Problem& p = params_.problem;
    const bool has_decay = p.log_decay.data != nullptr;
    A grad_lambda = A(0);
    for (int64_t i = 0; i < group_; ++i) {
      const int64_t head = key_head * group_ + i;
      StepCoefficients<A> grad{A(0), A(0), A(0)};
      for (const PartSums<A>& part : parts) {
        grad.erase += *part.scalar(0, i, t);
        grad.write += *part.scalar(1, i, t);
        grad.log_gate += *part.scalar(2, i, t);
      }
      const StepInputGradients<A> in = key_coefficients_backward(
          p.rule, *at<A>(p.beta, row, token, head), length.lambda, length.unit, has_decay,
          has_decay ? *at<A>(p.log_decay, row, token, head) : A(0), grad);
      if (params_.grad_beta.data) *at<A>(params_.grad_beta, row, token, head) = in.beta;
      if (params_.grad_log_decay.data)
        *at<A>(params_.grad_log_decay, row, token, head) = in.log_decay;
      grad_lambda += in.lambda;
    }
    return grad_lambda;
  }

  // grad <- gradient through y = x / sqrt(|x|^2 + 1e-6): r (grad - y (y . grad)), y = r x. A row as
  // long as a long key goes through x / unit.
  void l2norm_backward(const S* in, A* x, A* grad) {
    const int64_t n = params_.problem.shape.key_dim;
    load_row(D(), A(1), in, n, x);
    A square = dot(D(), x, x, n), unit = A(1);
    if (is_long(square)) {
      unit = shorten(x, n);
      square = dot(D(), x, x, n);
    } else {
      square += A(1e-6);
    }
    const A r = A(1) / std::sqrt(square);
    const A projection = r * r * dot(D(), x, grad, n);
    for (int64_t i = 0; i < n; ++i) grad[i] = r * (grad[i] - projection * x[i]) / unit;
  }

  const BackwardParams& params_;
  const int64_t group_;
  Scratch<A> memory_;
};

/// Part `part` of (sequence n, key head). `sums` holds its sums over the whole sequence; if null
/// the part is alone and finishes each segment itself.
template <typename S>
void backward_part(const BackwardParams& params, const BackwardPlan& plan, int64_t n,
                   int64_t key_head, int64_t part, void* sums) {
  using A = Arithmetic<S>;
  const Problem& p = params.problem;
  const Shape& s = p.shape;
  const Span span = sequence_span(p, n);
  const int64_t key_stride = padded(s.key_dim), stride = padded(plan.values.width);
  const int64_t unit0 = plan.units() * part / plan.parts;
  const int64_t unit1 = plan.units() * (part + 1) / plan.parts;

  // dS of every unit of the part, [K, width] each.
  Scratch<A> grad_states((unit1 - unit0) * s.key_dim * stride);
  const auto head_of = [&](int64_t unit) { return unit / plan.values.blocks; };  // in the group
  const auto first_of = [&](int64_t unit) { return unit % plan.values.blocks * plan.values.width; };
  const auto columns_of_unit = [&](int64_t unit) {
    return std::min(plan.values.width, s.value_dim - first_of(unit));
  };
  const auto offset_of = [&](int64_t unit) {
    return state_offset(s, n, key_head * plan.group + head_of(unit));
  };
  const auto grad_state = [&](int64_t unit) {
    return grad_states.get() + (unit - unit0) * s.key_dim * stride;
  };
  for (int64_t unit = unit0; params.grad_final_state && unit < unit1; ++unit)
    load_state(static_cast<const A*>(params.grad_final_state) + offset_of(unit), s, first_of(unit),
               columns_of_unit(unit), grad_state(unit), padded(columns_of_unit(unit)));

  const int64_t rows = sums ? span.size() : std::min(span.size(), kCheckpointTokens);
  const int64_t sums_size = PartSums<A>::size(rows, key_stride, plan.group);
  Scratch<A> own(sums ? 0 : sums_size);
  const PartSums<A> total{sums ? static_cast<A*>(sums) : own.get(), rows, key_stride, plan.group};
  Finish<S> finish(params, plan.group);
  std::unique_ptr<SegmentBackward<S>> segment;
  int64_t segment_columns = 0;
  for (int64_t i = ceil_div(span.size(), kCheckpointTokens) - 1; i >= 0; --i) {
    const int64_t begin = span.begin + i * kCheckpointTokens;
    const int64_t end = std::min(begin + kCheckpointTokens, span.end);
    const int64_t base = sums ? span.begin : begin;
    if (!sums) std::fill_n(total.data, sums_size, A(0));
    for (int64_t unit = unit0; unit < unit1; ++unit) {
      const int64_t columns = columns_of_unit(unit), head = head_of(unit);
      if (columns != segment_columns)
        segment = std::make_unique<SegmentBackward<S>>(params, span, columns);
      segment_columns = columns;
      const A* checkpoint = static_cast<const A*>(params.checkpoints) +
                            state_offset(s, checkpoint_row(p, n) + i, key_head * plan.group + head);
      segment->run(begin, end, key_head * plan.group + head, first_of(unit), checkpoint,
                   grad_state(unit), [&](int64_t token) {
                     const int64_t t = token - base;
                     return KeyGradients<A>{total.q(t), total.k(t), total.scalar(0, head, t),
                                            total.scalar(1, head, t), total.scalar(2, head, t)};
                   });
    }
    if (!sums) finish.run(span.row, key_head, begin, end - begin, base, {total});
  }
  for (int64_t unit = unit0; params.grad_initial_state && unit < unit1; ++unit)
    store_state(grad_state(unit), padded(columns_of_unit(unit)), s, first_of(unit),
                columns_of_unit(unit),
                static_cast<A*>(params.grad_initial_state) + offset_of(unit));
}

void backward_task(const BackwardParams& params, const BackwardPlan& plan, int64_t n,
                   int64_t key_head, int64_t part, void* sums) {
  dispatch_storage(params.problem.dtype, [&](auto tag) {
    backward_part<decltype(tag)>(params, plan, n, key_head, part, sums);
  });
}

/// Tokens [first, first + count) of (sequence n, key head) from the sums of all its parts.
void finish_task(const BackwardParams& params, const BackwardPlan& plan, int64_t n,
                 int64_t key_head, int64_t first, int64_t count, void* const* sums) {
  dispatch_storage(params.problem.dtype, [&](auto tag) {
    using A = Arithmetic<decltype(tag)>;
    const Span span = sequence_span(params.problem, n);
    std::vector<PartSums<A>> parts;
    parts.reserve(plan.parts);
    for (int64_t i = 0; i < plan.parts; ++i)
      parts.push_back({static_cast<A*>(sums[i]), span.size(), padded(params.problem.shape.key_dim),
                       plan.group});
    Finish<decltype(tag)>(params, plan.group)
        .run(span.row, key_head, first, count, span.begin, parts);
  });
}

}  // namespace
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {
namespace {

HWY_EXPORT(backward_task);
HWY_EXPORT(finish_task);

template <typename S>
void zero_outside_gradients(const BackwardParams& params) {
  const Problem& p = params.problem;
  const Shape& s = p.shape;
  using A = Arithmetic<S>;
  zero_outside<S>(p, params.grad_q, s.heads, s.key_dim);
  zero_outside<S>(p, params.grad_k, s.heads, s.key_dim);
  zero_outside<S>(p, params.grad_v, s.value_heads, s.value_dim);
  zero_outside<A>(p, params.grad_beta, s.value_heads, 1);
  zero_outside<A>(p, params.grad_log_decay, s.value_heads, 1);
}

BackwardPlan make_plan(const Problem& p, int64_t threads) {
  const Shape& s = p.shape;
  const int64_t pairs = s.sequences * s.heads;
  BackwardPlan plan;
  plan.group = s.value_heads / s.heads;
  plan.values = split_values(s, p.dtype, s.sequences * s.value_heads, threads);
  plan.parts = std::min(plan.units(), ceil_div(threads, pairs));
  return plan;
}

// Several parts per (sequence, key head): their sums over whole sequences, then the second pass.
void backward_in_parts(const BackwardParams& params, const BackwardPlan& plan,
                       const Executor& executor) {
  const Problem& p = params.problem;
  const Shape& s = p.shape;
  const int64_t pairs = s.sequences * s.heads, element = p.dtype == DType::kFloat64 ? 8 : 4;
  std::vector<Scratch<char>> memory;
  std::vector<void*> sums;
  struct Piece {
    int64_t pair, first, count;
  };
  std::vector<Piece> pieces;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const Span span = sequence_span(p, pair / s.heads);
    for (int64_t part = 0; part < plan.parts; ++part) {
      memory.emplace_back(element *
                          PartSums<char>::size(span.size(), padded(s.key_dim), plan.group));
      sums.push_back(memory.back().get());
    }
    for (int64_t t = span.begin; t < span.end; t += kCheckpointTokens)
      pieces.push_back({pair, t, std::min(kCheckpointTokens, span.end - t)});
  }
  executor.parallel_for(pairs * plan.parts, [&](int64_t i) {
    const int64_t pair = i / plan.parts;
    HWY_DYNAMIC_DISPATCH(backward_task)
    (params, plan, pair / s.heads, pair % s.heads, i % plan.parts, sums[i]);
  });
  executor.parallel_for(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
    const Piece& piece = pieces[i];
    HWY_DYNAMIC_DISPATCH(finish_task)
    (params, plan, piece.pair / s.heads, piece.pair % s.heads, piece.first, piece.count,
     sums.data() + piece.pair * plan.parts);
  });
}

}  // namespace

void chunk_backward(const BackwardParams& params, const Executor& executor) {
  const Problem& p = params.problem;
  const Shape& s = p.shape;
  dispatch_storage(p.dtype, [&](auto tag) { zero_outside_gradients<decltype(tag)>(params); });
  const int64_t pairs = s.sequences * s.heads;
  if (pairs == 0 || s.value_heads == 0) return;
  const BackwardPlan plan = make_plan(p, executor.threads);
  if (plan.parts > 1) {
    backward_in_parts(params, plan, executor);
    return;
  }
  executor.parallel_for(pairs, [&](int64_t pair) {
    HWY_DYNAMIC_DISPATCH(backward_task)
    (params, plan, pair / s.heads, pair % s.heads, 0, nullptr);
  });
}

}  // namespace efla::cpu
#endif  // HWY_ONCE
