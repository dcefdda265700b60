#include <cmath>
#include <vector>

#include "efla/kernels/cpu/layer_ops.h"
#include "efla/kernels/cpu/storage.h"

namespace efla::cpu {

void rms_norm_forward(const RmsNormParams& p, const Executor& executor) {
  dispatch_storage(p.dtype, [&](auto tag) {
    using S = decltype(tag);
    using A = Arithmetic<S>;
    const S* weight = static_cast<const S*>(p.weight);
    for (int64_t r = 0; r < p.rows; ++r) {
      const S* x = static_cast<const S*>(p.x) + r * p.dim;
      const S* gate = p.gate ? static_cast<const S*>(p.gate) + r * p.dim : nullptr;
      S* y = static_cast<S*>(p.y) + r * p.dim;
      A sum = 0;
      for (int64_t d = 0; d < p.dim; ++d) sum += to_arithmetic(x[d]) * to_arithmetic(x[d]);
      const A scale = 1 / std::sqrt(sum / A(p.dim) + A(p.eps));
      for (int64_t d = 0; d < p.dim; ++d) {
        A out = to_arithmetic(x[d]) * scale;
        if (weight) out *= to_arithmetic(weight[d]);
        if (gate) out *= to_arithmetic(gate[d]) / (1 + std::exp(-to_arithmetic(gate[d])));
        y[d] = from_arithmetic<S>(out);
      }
    }
  });
}

void rms_norm_backward(const RmsNormBackwardParams& p, const Executor& executor) {
  dispatch_storage(p.forward.dtype, [&](auto tag) {
    using S = decltype(tag);
    using A = Arithmetic<S>;
    const int64_t dim = p.forward.dim;
    const S* weight = static_cast<const S*>(p.forward.weight);
    std::vector<A> grad_weight(dim, A(0)), grad_normed(dim);
    for (int64_t r = 0; r < p.forward.rows; ++r) {
      const S* x = static_cast<const S*>(p.forward.x) + r * dim;
      const S* gate = p.forward.gate ? static_cast<const S*>(p.forward.gate) + r * dim : nullptr;
      const S* grad_y = static_cast<const S*>(p.grad_y) + r * dim;
      A sum = 0;
      for (int64_t d = 0; d < dim; ++d) sum += to_arithmetic(x[d]) * to_arithmetic(x[d]);
      const A scale = 1 / std::sqrt(sum / A(dim) + A(p.forward.eps));
      A dot = 0;  // <normed x, its gradient>
      for (int64_t d = 0; d < dim; ++d) {
        const A normed = to_arithmetic(x[d]) * scale;
        const A w = weight ? to_arithmetic(weight[d]) : A(1);
        A dy = to_arithmetic(grad_y[d]);
        if (gate) {
          const A g = to_arithmetic(gate[d]);
          const A sigmoid = 1 / (1 + std::exp(-g));
          if (p.grad_gate)
            static_cast<S*>(p.grad_gate)[r * dim + d] =
                from_arithmetic<S>(dy * normed * w * sigmoid * (1 + g * (1 - sigmoid)));
          dy *= g * sigmoid;
        }
        grad_weight[d] += dy * normed;
        grad_normed[d] = dy * w;
        dot += grad_normed[d] * normed;
      }
      if (!p.grad_x) continue;
      for (int64_t d = 0; d < dim; ++d)
        static_cast<S*>(p.grad_x)[r * dim + d] = from_arithmetic<S>(
            scale * (grad_normed[d] - to_arithmetic(x[d]) * scale * dot / A(dim)));
    }
    if (p.grad_weight)
      for (int64_t d = 0; d < dim; ++d) static_cast<A*>(p.grad_weight)[d] = grad_weight[d];
  });
}

}  // namespace efla::cpu
