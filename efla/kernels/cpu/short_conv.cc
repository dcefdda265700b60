#include <cmath>
#include <vector>

#include "efla/kernels/cpu/layer_ops.h"
#include "efla/kernels/cpu/storage.h"

namespace efla::cpu {
namespace {

struct Sequence {
  int64_t row, begin, length;
};

Sequence sequence_at(const ShortConvParams& p, int64_t n) {
  if (p.cu_seqlens == nullptr) return {n, 0, p.tokens};
  return {0, p.cu_seqlens[n], p.cu_seqlens[n + 1] - p.cu_seqlens[n]};
}

template <typename S, typename V>
auto* element(const V& view, int64_t row, int64_t t, int64_t d) {
  using Pointer =
      std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(view.data)>>, const S*, S*>;
  return static_cast<Pointer>(view.data) + row * view.batch + t * view.token + d;
}

// Input at time t of a sequence; t < 0 reads the initial state.
template <typename S>
Arithmetic<S> input_at(const ShortConvParams& p, const Sequence& s, int64_t n, int64_t t,
                       int64_t d) {
  if (t >= 0) return to_arithmetic(*element<S>(p.x, s.row, s.begin + t, d));
  if (p.initial_state == nullptr) return 0;
  return to_arithmetic(
      static_cast<const S*>(p.initial_state)[(n * p.channels + d) * p.width + p.width + t]);
}

template <typename S>
void zero_outside(const ShortConvParams& p, const MutableView& y) {
  if (p.cu_seqlens == nullptr || y.data == nullptr) return;
  for (int64_t t = 0; t < p.tokens; ++t) {
    if (p.sequences > 0 && t >= p.cu_seqlens[0] && t < p.cu_seqlens[p.sequences]) continue;
    for (int64_t d = 0; d < p.channels; ++d) *element<S>(y, 0, t, d) = from_arithmetic<S>(0);
  }
}

}  // namespace

void short_conv_forward(const ShortConvParams& p, const Executor& executor) {
  dispatch_storage(p.dtype, [&](auto tag) {
    using S = decltype(tag);
    using A = Arithmetic<S>;
    const S* weight = static_cast<const S*>(p.weight);
    zero_outside<S>(p, p.y);
    for (int64_t n = 0; n < p.sequences; ++n) {
      const Sequence s = sequence_at(p, n);
      for (int64_t d = 0; d < p.channels; ++d) {
        for (int64_t t = 0; t < s.length; ++t) {
          A sum = 0;
          for (int64_t w = 0; w < p.width; ++w)
            sum += to_arithmetic(weight[d * p.width + w]) *
                   input_at<S>(p, s, n, t - p.width + 1 + w, d);
          if (p.silu) sum = sum / (1 + std::exp(-sum));
          *element<S>(p.y, s.row, s.begin + t, d) = from_arithmetic<S>(sum);
        }
        if (p.final_state == nullptr) continue;
        S* final_state = static_cast<S*>(p.final_state) + (n * p.channels + d) * p.width;
        for (int64_t w = 0; w < p.width; ++w)
          final_state[w] = from_arithmetic<S>(input_at<S>(p, s, n, s.length - p.width + w, d));
      }
    }
  });
}

void short_conv_backward(const ShortConvBackwardParams& bp, const Executor& executor) {
  const ShortConvParams& p = bp.forward;
  dispatch_storage(p.dtype, [&](auto tag) {
    using S = decltype(tag);
    using A = Arithmetic<S>;
    const S* weight = static_cast<const S*>(p.weight);
    zero_outside<S>(p, bp.grad_x);
    std::vector<A> grad_weight(p.channels * p.width, A(0));
    std::vector<A> grad_in;
    for (int64_t n = 0; n < p.sequences; ++n) {
      const Sequence s = sequence_at(p, n);
      for (int64_t d = 0; d < p.channels; ++d) {
        grad_in.assign(s.length + p.width, A(0));  // index t + width
        for (int64_t t = 0; t < s.length; ++t) {
          A dy = to_arithmetic(*element<S>(bp.grad_y, s.row, s.begin + t, d));
          if (p.silu) {
            A z = 0;
            for (int64_t w = 0; w < p.width; ++w)
              z += to_arithmetic(weight[d * p.width + w]) *
                   input_at<S>(p, s, n, t - p.width + 1 + w, d);
            const A sigmoid = 1 / (1 + std::exp(-z));
            dy *= sigmoid * (1 + z * (1 - sigmoid));
          }
          for (int64_t w = 0; w < p.width; ++w) {
            grad_weight[d * p.width + w] += dy * input_at<S>(p, s, n, t - p.width + 1 + w, d);
            grad_in[t + 1 + w] += dy * to_arithmetic(weight[d * p.width + w]);
          }
        }
        const int64_t state = (n * p.channels + d) * p.width;
        if (bp.grad_final_state)
          for (int64_t w = 0; w < p.width; ++w)
            grad_in[s.length + w] +=
                to_arithmetic(static_cast<const S*>(bp.grad_final_state)[state + w]);
        if (bp.grad_x.data)
          for (int64_t t = 0; t < s.length; ++t)
            *element<S>(bp.grad_x, s.row, s.begin + t, d) =
                from_arithmetic<S>(grad_in[p.width + t]);
        if (bp.grad_initial_state)
          for (int64_t w = 0; w < p.width; ++w)
            static_cast<S*>(bp.grad_initial_state)[state + w] = from_arithmetic<S>(grad_in[w]);
      }
    }
    if (bp.grad_weight)
      for (int64_t i = 0; i < p.channels * p.width; ++i)
        static_cast<S*>(bp.grad_weight)[i] = from_arithmetic<S>(grad_weight[i]);
  });
}

}  // namespace efla::cpu
