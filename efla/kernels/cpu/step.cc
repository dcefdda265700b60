#include "efla/kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/kernels/cpu/step.cc"
#include <algorithm>
#include <type_traits>

#include "efla/kernels/cpu/delta_rule.h"
#include "efla/kernels/cpu/parallel.h"
#include "efla/kernels/cpu/storage.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h, as Highway asks:
#include "efla/kernels/cpu/step-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace {

// Columns of a unit: a multiple of every target's block, so that the split never cuts a block.
constexpr int64_t kUnitColumns = 64;

// The tokens of one (row, value head), converted: what all its column blocks share.
template <typename S>
class HeadTokens {
 public:
  using A = Arithmetic<S>;
  using D = hn::ScalableTag<A>;

  void load(const Problem& p, int64_t b, int64_t h) {
    const D d;
    const Shape& s = p.shape;
    const int64_t key_head = h / (s.value_heads / s.heads);
    const bool has_decay = p.log_decay.data != nullptr;
    for (int64_t t = 0; t < s.tokens; ++t) {
      A* q = q_ + t * s.key_dim;
      A* k = k_ + t * s.key_dim;
      load_key_row(d, at<S>(p.q, b, t, key_head), s.key_dim, p.qk_l2norm, A(p.scale), q);
      const KeyLength<A> length =
          load_key(d, p.rule, at<S>(p.k, b, t, key_head), s.key_dim, p.qk_l2norm, k);
      scalars_[t] = step_scalars(d, p.rule, q, k, length, s.key_dim, *at<A>(p.beta, b, t, h),
                                 has_decay, has_decay ? *at<A>(p.log_decay, b, t, h) : A(0));
    }
  }

  // Columns [j0, j0 + columns) of the state [K, V] of this head, stored as P.
  template <typename P>
  void run(const StepParams& p, int64_t b, int64_t h, P* state, int64_t j0, int64_t columns) {
    const D d;
    const Shape& s = p.problem.shape;
    for (int64_t t = 0; t < s.tokens; ++t) {
      const S* v = at<S>(p.problem.v, b, t, h) + j0;
      for_vectors(d, columns, [&](int64_t j, auto n) HWY_ATTR {
        store(d, load_some(d, v + j, n), values_ + t * kMaxHeadDim + j);
      });
    }
    StepTokens<A> x;
    x.count = s.tokens;
    x.key_dim = s.key_dim;
    x.q = q_;
    x.k = k_;
    x.key_stride = s.key_dim;
    x.scalars = scalars_;
    x.v = x.o = values_;
    x.value_stride = kMaxHeadDim;
    if constexpr (std::is_same_v<P, A>) {
      step_block(d, x, state + j0, s.value_dim, columns);
    } else {
      step_rounded(d, x, state + j0, s.value_dim, columns);
    }
    for (int64_t t = 0; t < s.tokens; ++t) {
      S* o = at<S>(p.o, b, t, h) + j0;
      for_vectors(d, columns, [&](int64_t j, auto n) HWY_ATTR {
        store_some(d, HWY_NAMESPACE::load(d, values_ + t * kMaxHeadDim + j), o + j, n);
      });
    }
  }

 private:
  // A state that is stored in fewer bits, so many columns at a time that they stay in L1: all
  // tokens in the arithmetic type, then one rounding.
  template <typename P>
  void step_rounded(D d, const StepTokens<A>& tokens, P* state, int64_t stride, int64_t columns) {
    constexpr int64_t kWidth = kStepVectors * hn::MaxLanes(D());
    HWY_ALIGN A block[kMaxHeadDim * kWidth];
    StepTokens<A> x = tokens;
    for (int64_t j0 = 0; j0 < columns; j0 += kWidth) {
      const int64_t width = std::min(kWidth, columns - j0);
      for (int64_t i = 0; i < x.key_dim; ++i)
        for_vectors(d, width, [&](int64_t j, auto n) HWY_ATTR {
          store(d, load_some(d, state + i * stride + j0 + j, n), block + i * kWidth + j);
        });
      x.v = tokens.v + j0;
      x.o = tokens.o + j0;
      step_block(d, x, block, kWidth, width);
      for (int64_t i = 0; i < x.key_dim; ++i)
        for_vectors(d, width, [&](int64_t j, auto n) HWY_ATTR {
          const auto row = HWY_NAMESPACE::load(d, block + i * kWidth + j);
          store_some(d, row, state + i * stride + j0 + j, n);
        });
    }
  }

  HWY_ALIGN A q_[kMaxStepTokens * kMaxHeadDim];
  HWY_ALIGN A k_[kMaxStepTokens * kMaxHeadDim];
  HWY_ALIGN A values_[kMaxStepTokens * kMaxHeadDim];  // v on entry, o on return
  StepScalars<A> scalars_[kMaxStepTokens];
};

template <typename S>
void zero_output(const StepParams& p, int64_t b, int64_t h, int64_t j0, int64_t columns) {
  for (int64_t t = 0; t < p.problem.shape.tokens; ++t)
    std::fill_n(at<S>(p.o, b, t, h) + j0, columns, from_arithmetic<S>(0));
}

// A unit is a block of columns of one (row, value head); tasks are contiguous ranges of units. The
// state is stored as P.
template <typename S, typename P>
void step_units(const StepParams& p, int64_t begin, int64_t end, int64_t blocks) {
  const Shape& s = p.problem.shape;
  HeadTokens<S> tokens;
  int64_t loaded = -1;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t row_head = unit / blocks;
    const int64_t b = row_head / s.value_heads, h = row_head % s.value_heads;
    const int64_t j0 = unit % blocks * kUnitColumns;
    const int64_t columns = std::min(kUnitColumns, s.value_dim - j0);
    const int64_t slot = p.state_indices ? p.state_indices[b] : b;
    if (slot < 0) {
      zero_output<S>(p, b, h, j0, columns);
      continue;
    }
    if (loaded != row_head) tokens.load(p.problem, b, h);
    loaded = row_head;
    P* state = static_cast<P*>(p.state) + (slot * s.value_heads + h) * s.key_dim * s.value_dim;
    tokens.run(p, b, h, state, j0, columns);
  }
}

void step_task(const StepParams& p, int64_t begin, int64_t end, int64_t blocks) {
  dispatch_storage(p.problem.dtype, [&](auto tag) {
    using S = decltype(tag);
    using A = Arithmetic<S>;
    if constexpr (std::is_same_v<A, float>) {
      if (p.state_dtype == DType::kBFloat16) {
        step_units<S, BFloat16>(p, begin, end, blocks);
        return;
      }
    }
    step_units<S, A>(p, begin, end, blocks);
  });
}

}  // namespace
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {
namespace {

HWY_EXPORT(step_task);

// State that a task must have to be worth a thread: waking one costs a few microseconds.
constexpr int64_t kTaskBytes = 128 * 1024;

}  // namespace

void step(const StepParams& p, const Executor& executor) {
  const Shape& s = p.problem.shape;
  if (s.tokens == 0) return;
  constexpr int64_t kUnitColumns = HWY_NAMESPACE::kUnitColumns;
  const int64_t blocks = (s.value_dim + kUnitColumns - 1) / kUnitColumns;
  const int64_t units = s.batch * s.value_heads * blocks;
  if (units == 0) return;
  const int64_t element_bytes = p.problem.dtype == DType::kFloat64  ? 8
                                : p.state_dtype == DType::kBFloat16 ? 2
                                                                    : 4;
  const int64_t unit_bytes = s.key_dim * std::min(s.value_dim, kUnitColumns) * element_bytes;
  parallel_ranges(executor, units, kTaskBytes / std::max<int64_t>(unit_bytes, 1),
                  [&](int64_t begin, int64_t end) {
                    const auto run = HWY_DYNAMIC_DISPATCH(step_task);
                    run(p, begin, end, blocks);
                  });
}

}  // namespace efla::cpu
#endif  // HWY_ONCE
