#include "efla/kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "efla/kernels/cpu/rms_norm.cc"
#include <algorithm>
#include <cmath>
#include <vector>

#include "efla/kernels/cpu/layer_ops.h"
#include "efla/kernels/cpu/parallel.h"
#include "efla/kernels/cpu/storage.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h, as Highway asks:
#include "efla/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {
namespace {

// rsqrt(mean(x^2) + eps) of a row.
template <class D, typename S>
HWY_INLINE hn::TFromD<D> inverse_rms(D d, const S* x, int64_t dim, double eps) {
  using A = hn::TFromD<D>;
  auto sum = hn::Zero(d);
  for_vectors(d, dim, [&](int64_t i, auto n) HWY_ATTR {
    const auto v = load_some(d, x + i, n);
    sum = hn::MulAdd(v, v, sum);
  });
  return A(1) / std::sqrt(hn::GetLane(hn::SumOfLanes(d, sum)) / A(dim) + A(eps));
}

template <typename S>
void forward_rows(const RmsNormParams& p, int64_t begin, int64_t end) {
  const hn::ScalableTag<Arithmetic<S>> d;
  const S* weight = static_cast<const S*>(p.weight);
  for (int64_t r = begin; r < end; ++r) {
    const S* x = static_cast<const S*>(p.x) + r * p.dim;
    const S* gate = p.gate ? static_cast<const S*>(p.gate) + r * p.dim : nullptr;
    S* y = static_cast<S*>(p.y) + r * p.dim;
    const auto scale = hn::Set(d, inverse_rms(d, x, p.dim, p.eps));
    for_vectors(d, p.dim, [&](int64_t i, auto n) HWY_ATTR {
      auto out = hn::Mul(load_some(d, x + i, n), scale);
      if (weight) out = hn::Mul(out, load_some(d, weight + i, n));
      if (gate) {
        const auto g = load_some(d, gate + i, n);
        out = hn::Mul(out, hn::Mul(g, sigmoid(d, g)));
      }
      store_some(d, out, y + i, n);
    });
  }
}

// Backward of one row. `normed` is x * scale; scratch [dim] receives the gradient with respect to
// it, grad_weight [dim] is added to. Padding lanes are zero throughout.
template <class D, typename S, typename A>
HWY_INLINE void backward_row(D d, const RmsNormBackwardParams& p, int64_t r, A* scratch,
                             A* grad_weight) {
  const int64_t dim = p.forward.dim, offset = r * dim;
  const S* x = static_cast<const S*>(p.forward.x) + offset;
  const S* weight = static_cast<const S*>(p.forward.weight);
  const S* gate = p.forward.gate ? static_cast<const S*>(p.forward.gate) + offset : nullptr;
  const S* grad_y = static_cast<const S*>(p.grad_y) + offset;
  const auto scale = hn::Set(d, inverse_rms(d, x, dim, p.forward.eps));
  auto sum = hn::Zero(d);  // <normed, its gradient>
  for_vectors(d, dim, [&](int64_t i, auto n) HWY_ATTR {
    const auto normed = hn::Mul(load_some(d, x + i, n), scale);
    const auto w = weight ? load_some(d, weight + i, n) : hn::Set(d, A(1));
    auto dy = load_some(d, grad_y + i, n);
    if (gate) {
      const auto g = load_some(d, gate + i, n);
      const auto s = sigmoid(d, g);
      if (p.grad_gate != nullptr) {
        const auto out = hn::Mul(hn::Mul(dy, normed), hn::Mul(w, silu_derivative(d, g, s)));
        store_some(d, out, static_cast<S*>(p.grad_gate) + offset + i, n);
      }
      dy = hn::Mul(dy, hn::Mul(g, s));
    }
    const auto total = hn::MulAdd(dy, normed, load_some(d, grad_weight + i, n));
    store_some(d, total, grad_weight + i, n);
    const auto grad_normed = hn::Mul(dy, w);
    store_some(d, grad_normed, scratch + i, n);
    sum = hn::MulAdd(grad_normed, normed, sum);
  });
  if (p.grad_x == nullptr) return;
  // dx = scale (dn - n <n, dn> / dim), n = normed.
  const A mean = hn::GetLane(hn::SumOfLanes(d, sum)) / A(dim);
  const auto factor = hn::Mul(scale, hn::Set(d, mean));
  for_vectors(d, dim, [&](int64_t i, auto n) HWY_ATTR {
    const auto dn = load_some(d, scratch + i, n);
    const auto dx = hn::Mul(scale, hn::NegMulAdd(load_some(d, x + i, n), factor, dn));
    store_some(d, dx, static_cast<S*>(p.grad_x) + offset + i, n);
  });
}

template <typename S>
void backward_rows(const RmsNormBackwardParams& p, int64_t begin, int64_t end, void* partial) {
  using A = Arithmetic<S>;
  const hn::ScalableTag<A> d;
  std::vector<A> scratch(p.forward.dim);
  A* grad_weight = static_cast<A*>(partial);
  std::fill_n(grad_weight, p.forward.dim, A(0));
  for (int64_t r = begin; r < end; ++r)
    backward_row<hn::ScalableTag<A>, S, A>(d, p, r, scratch.data(), grad_weight);
}

void rms_norm_forward_rows(const RmsNormParams& p, int64_t begin, int64_t end) {
  dispatch_storage(p.dtype, [&](auto tag) { forward_rows<decltype(tag)>(p, begin, end); });
}
// partial: [dim] in the arithmetic type, the rows' share of grad_weight.
void rms_norm_backward_rows(const RmsNormBackwardParams& p, int64_t begin, int64_t end,
                            void* partial) {
  dispatch_storage(p.forward.dtype,
                   [&](auto tag) { backward_rows<decltype(tag)>(p, begin, end, partial); });
}

}  // namespace
}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace efla::cpu {
namespace {

HWY_EXPORT(rms_norm_forward_rows);
HWY_EXPORT(rms_norm_backward_rows);

constexpr int64_t kGrain = 16384;  // elements that make a thread worth waking

// grad_weight is summed over fixed blocks of rows and then over the blocks in order, so that it
// does not depend on the number of threads. The number of blocks bounds the workspace.
constexpr int64_t kMinBlockRows = 64;
constexpr int64_t kMaxBlocks = 128;

template <typename A>
void backward_blocks(const RmsNormBackwardParams& p, const Executor& executor) {
  const int64_t rows = p.forward.rows, dim = p.forward.dim;
  const int64_t block = std::max(kMinBlockRows, (rows + kMaxBlocks - 1) / kMaxBlocks);
  const int64_t blocks = (rows + block - 1) / block;
  std::vector<A> partial(blocks * dim);
  parallel_ranges(executor, blocks, kGrain / (block * dim), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) HWY_DYNAMIC_DISPATCH(rms_norm_backward_rows)
    (p, i * block, std::min((i + 1) * block, rows), partial.data() + i * dim);
  });
  if (p.grad_weight == nullptr) return;
  A* out = static_cast<A*>(p.grad_weight);
  std::fill_n(out, dim, A(0));
  for (int64_t i = 0; i < blocks; ++i)
    for (int64_t j = 0; j < dim; ++j) out[j] += partial[i * dim + j];
}

}  // namespace

void rms_norm_forward(const RmsNormParams& p, const Executor& executor) {
  if (p.dim == 0) return;
  parallel_ranges(executor, p.rows, kGrain / p.dim, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(rms_norm_forward_rows)(p, begin, end);
  });
}

void rms_norm_backward(const RmsNormBackwardParams& p, const Executor& executor) {
  if (p.forward.dim == 0) return;
  if (p.forward.dtype == DType::kFloat64) {
    backward_blocks<double>(p, executor);
  } else {
    backward_blocks<float>(p, executor);
  }
}

}  // namespace efla::cpu
#endif  // HWY_ONCE
