#include <cmath>
#include <vector>

#include "efla/kernels/cpu/delta_rule.h"
#include "efla/kernels/cpu/storage.h"

namespace efla::cpu {
namespace {

template <typename S>
std::vector<Arithmetic<S>> load_row(const S* x, int64_t count, bool l2norm) {
  using A = Arithmetic<S>;
  std::vector<A> out(count);
  A sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    out[i] = to_arithmetic(x[i]);
    sum += out[i] * out[i];
  }
  if (l2norm)
    for (A& value : out) value *= 1 / std::sqrt(sum + A(1e-6));
  return out;
}

template <typename T>
T* element(const MutableView& v, int64_t b, int64_t t, int64_t h) {
  return static_cast<T*>(v.data) + b * v.batch + t * v.token + h * v.head;
}
template <typename T>
const T* element(const View& v, int64_t b, int64_t t, int64_t h) {
  return static_cast<const T*>(v.data) + b * v.batch + t * v.token + h * v.head;
}

template <typename S>
void step_head(const StepParams& p, int64_t b, int64_t h, Arithmetic<S>* state) {
  using A = Arithmetic<S>;
  const Problem& pr = p.problem;
  const int64_t K = pr.shape.key_dim, V = pr.shape.value_dim;
  const int64_t hk = h / (pr.shape.value_heads / pr.shape.heads);
  for (int64_t t = 0; t < pr.shape.tokens; ++t) {
    const std::vector<A> q = load_row(element<S>(pr.q, b, t, hk), K, pr.qk_l2norm);
    const std::vector<A> k = load_row(element<S>(pr.k, b, t, hk), K, pr.qk_l2norm);
    A lambda = 0;
    for (A x : k) lambda += x * x;
    const bool has_decay = pr.log_decay.data != nullptr;
    const StepCoefficients<A> c =
        step_coefficients<A>(pr.rule, *element<A>(pr.beta, b, t, h), lambda, has_decay,
                             has_decay ? *element<A>(pr.log_decay, b, t, h) : A(0));
    const A decay = std::exp(c.log_gate);
    for (int64_t j = 0; j < V; ++j) {
      A dot = 0;
      for (int64_t i = 0; i < K; ++i) dot += state[i * V + j] * k[i];
      const A u = c.write * to_arithmetic(element<S>(pr.v, b, t, h)[j]) - decay * c.erase * dot;
      A out = 0;
      for (int64_t i = 0; i < K; ++i) {
        state[i * V + j] = decay * state[i * V + j] + k[i] * u;
        out += state[i * V + j] * q[i];
      }
      element<S>(p.o, b, t, h)[j] = from_arithmetic<S>(A(pr.scale) * out);
    }
  }
}

}  // namespace

void step(const StepParams& p, const Executor& executor) {
  dispatch_storage(p.problem.dtype, [&](auto tag) {
    using S = decltype(tag);
    using A = Arithmetic<S>;
    const Shape& shape = p.problem.shape;
    executor.parallel_for(shape.batch * shape.value_heads, [&](int64_t task) {
      const int64_t b = task / shape.value_heads, h = task % shape.value_heads;
      const int64_t slot = p.state_indices ? p.state_indices[b] : b;
      if (slot < 0) {
        for (int64_t t = 0; t < shape.tokens; ++t)
          for (int64_t j = 0; j < shape.value_dim; ++j)
            element<S>(p.o, b, t, h)[j] = from_arithmetic<S>(0);
        return;
      }
      step_head<S>(p, b, h,
                   static_cast<A*>(p.state) +
                       (slot * shape.value_heads + h) * shape.key_dim * shape.value_dim);
    });
  });
}

}  // namespace efla::cpu
