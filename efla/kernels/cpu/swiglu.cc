#include "efla/kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/kernels/cpu/swiglu.cc"
#include <algorithm>
#include <cstdint>

#include "efla/kernels/cpu/layer_ops.h"
#include "efla/kernels/cpu/parallel.h"
#include "efla/kernels/cpu/storage.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h, as Highway asks:
#include "efla/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace {

template <typename S>
void forward_range(const SwigluParams& p, int64_t begin, int64_t end) {
  const hn::ScalableTag<Arithmetic<S>> d;
  const S* gate = static_cast<const S*>(p.gate);
  const S* up = static_cast<const S*>(p.up);
  S* y = static_cast<S*>(p.y);
  for_vectors(d, end - begin, [&](int64_t i, auto n) HWY_ATTR {
    i += begin;
    const auto g = load_some(d, gate + i, n);
    store_some(d, hn::Mul(hn::Mul(g, sigmoid(d, g)), load_some(d, up + i, n)), y + i, n);
  });
}

template <typename S>
void backward_range(const SwigluBackwardParams& p, int64_t begin, int64_t end) {
  const hn::ScalableTag<Arithmetic<S>> d;
  const S* gate = static_cast<const S*>(p.forward.gate);
  const S* up = static_cast<const S*>(p.forward.up);
  const S* grad_y = static_cast<const S*>(p.grad_y);
  S* grad_gate = static_cast<S*>(p.grad_gate);
  S* grad_up = static_cast<S*>(p.grad_up);
  for_vectors(d, end - begin, [&](int64_t i, auto n) HWY_ATTR {
    i += begin;
    const auto g = load_some(d, gate + i, n);
    const auto dy = load_some(d, grad_y + i, n);
    const auto s = sigmoid(d, g);
    const auto dg = hn::Mul(hn::Mul(dy, load_some(d, up + i, n)), silu_derivative(d, g, s));
    if (grad_gate != nullptr) store_some(d, dg, grad_gate + i, n);
    if (grad_up != nullptr) store_some(d, hn::Mul(dy, hn::Mul(g, s)), grad_up + i, n);
  });
}

void swiglu_forward_range(const SwigluParams& p, int64_t begin, int64_t end) {
  dispatch_storage(p.dtype, [&](auto tag) { forward_range<decltype(tag)>(p, begin, end); });
}
void swiglu_backward_range(const SwigluBackwardParams& p, int64_t begin, int64_t end) {
  dispatch_storage(p.forward.dtype,
                   [&](auto tag) { backward_range<decltype(tag)>(p, begin, end); });
}

}  // namespace
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {
namespace {

HWY_EXPORT(swiglu_forward_range);
HWY_EXPORT(swiglu_backward_range);

// Elements that make a thread worth waking, and the multiple at which ranges are cut.
constexpr int64_t kGrain = 16384;
constexpr int64_t kLine = 64;

template <typename Body>
void parallel_elements(const Executor& executor, int64_t count, const Body& body) {
  parallel_ranges(
      executor, (count + kLine - 1) / kLine, kGrain / kLine,
      [&](int64_t begin, int64_t end) { body(begin * kLine, std::min(end * kLine, count)); });
}

}  // namespace

void swiglu_forward(const SwigluParams& p, const Executor& executor) {
  parallel_elements(executor, p.count, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(swiglu_forward_range)(p, begin, end);
  });
}

void swiglu_backward(const SwigluBackwardParams& p, const Executor& executor) {
  parallel_elements(executor, p.forward.count, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(swiglu_backward_range)(p, begin, end);
  });
}

}  // namespace efla::cpu
#endif  // HWY_ONCE
