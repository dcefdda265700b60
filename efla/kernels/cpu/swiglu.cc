#include <cmath>

#include "efla/kernels/cpu/layer_ops.h"
#include "efla/kernels/cpu/storage.h"

namespace efla::cpu {

void swiglu_forward(const SwigluParams& p, const Executor& executor) {
  dispatch_storage(p.dtype, [&](auto tag) {
    using S = decltype(tag);
    using A = Arithmetic<S>;
    const S* gate = static_cast<const S*>(p.gate);
    const S* up = static_cast<const S*>(p.up);
    S* y = static_cast<S*>(p.y);
    for (int64_t i = 0; i < p.count; ++i) {
      const A g = to_arithmetic(gate[i]);
      y[i] = from_arithmetic<S>(g / (1 + std::exp(-g)) * to_arithmetic(up[i]));
    }
  });
}

void swiglu_backward(const SwigluBackwardParams& p, const Executor& executor) {
  dispatch_storage(p.forward.dtype, [&](auto tag) {
    using S = decltype(tag);
    using A = Arithmetic<S>;
    const S* gate = static_cast<const S*>(p.forward.gate);
    const S* up = static_cast<const S*>(p.forward.up);
    const S* grad_y = static_cast<const S*>(p.grad_y);
    S* grad_gate = static_cast<S*>(p.grad_gate);
    S* grad_up = static_cast<S*>(p.grad_up);
    for (int64_t i = 0; i < p.forward.count; ++i) {
      const A g = to_arithmetic(gate[i]);
      const A dy = to_arithmetic(grad_y[i]);
      const A sigmoid = 1 / (1 + std::exp(-g));
      grad_gate[i] =
          from_arithmetic<S>(dy * to_arithmetic(up[i]) * sigmoid * (1 + g * (1 - sigmoid)));
      grad_up[i] = from_arithmetic<S>(dy * g * sigmoid);
    }
  });
}

}  // namespace efla::cpu
