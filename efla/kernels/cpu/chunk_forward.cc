// The first, scalar version: token by token in double, one (sequence, value head) at a time.
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "efla/kernels/cpu/delta_rule.h"

namespace efla::cpu {
namespace {

double load(const void* p, DType t, int64_t i) {
  switch (t) {
    case DType::kFloat32:
      return static_cast<const float*>(p)[i];
    case DType::kFloat64:
      return static_cast<const double*>(p)[i];
    case DType::kBFloat16:
      return std::bit_cast<float>(uint32_t{static_cast<const uint16_t*>(p)[i]} << 16);
    case DType::kFloat16:
      return static_cast<double>(static_cast<const _Float16*>(p)[i]);
  }
  return 0;
}

void store(void* p, DType t, int64_t i, double x) {
  switch (t) {
    case DType::kFloat32:
      static_cast<float*>(p)[i] = static_cast<float>(x);
      break;
    case DType::kFloat64:
      static_cast<double*>(p)[i] = x;
      break;
    case DType::kBFloat16: {
      const uint32_t u = std::bit_cast<uint32_t>(static_cast<float>(x));
      static_cast<uint16_t*>(p)[i] = static_cast<uint16_t>((u + 0x7FFF + ((u >> 16) & 1)) >> 16);
      break;
    }
    case DType::kFloat16:
      static_cast<_Float16*>(p)[i] = static_cast<_Float16>(x);
      break;
  }
}

using Row = std::vector<double>;

struct Token {
  Row q, k, v;
  double q_norm = 1, k_norm = 1;
  double beta = 0, lambda = 0, log_decay = 0;
  StepCoefficients<double> c{};
};

class Sequence {
 public:
  Sequence(const Problem& p, int64_t n, int64_t hv) : p_(p), n_(n), hv_(hv) {
    const Shape& s = p.shape;
    h_ = hv / (s.value_heads / s.heads);
    row_ = p.cu_seqlens ? 0 : n;
    begin_ = p.cu_seqlens ? p.cu_seqlens[n] : 0;
    end_ = p.cu_seqlens ? p.cu_seqlens[n + 1] : s.tokens;
    arith_ = p.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    state_offset_ = (n * s.value_heads + hv) * s.key_dim * s.value_dim;
  }
  int64_t checkpoint_offset(int64_t t) const {
    const Shape& s = p_.shape;
    const int64_t per = (s.tokens + kCheckpointTokens - 1) / kCheckpointTokens;
    const int64_t base = p_.cu_seqlens ? n_ + begin_ / kCheckpointTokens : n_ * per;
    return ((base + (t - begin_) / kCheckpointTokens) * s.value_heads + hv_) * s.key_dim *
           s.value_dim;
  }
  Token token(int64_t t) const {
    const Shape& s = p_.shape;
    Token x;
    auto row = [&](const View& view, int64_t head, int64_t dim) {
      Row r(dim);
      for (int64_t i = 0; i < dim; ++i)
        r[i] = load(view.data, p_.dtype, row_ * view.batch + t * view.token + head * view.head + i);
      return r;
    };
    x.q = row(p_.q, h_, s.key_dim);
    x.k = row(p_.k, h_, s.key_dim);
    x.v = row(p_.v, hv_, s.value_dim);
    auto normalise = [](Row& r) {
      double sum = 0;
      for (double e : r) sum += e * e;
      const double inv = 1 / std::sqrt(sum + 1e-6);
      for (double& e : r) e *= inv;
      return inv;
    };
    if (p_.qk_l2norm) {
      x.q_norm = normalise(x.q);
      x.k_norm = normalise(x.k);
    }
    for (double e : x.k) x.lambda += e * e;
    auto scalar = [&](const View& view) {
      return load(view.data, arith_, row_ * view.batch + t * view.token + hv_ * view.head);
    };
    x.beta = scalar(p_.beta);
    if (p_.log_decay.data) x.log_decay = scalar(p_.log_decay);
    x.c = step_coefficients(p_.rule, x.beta, x.lambda, p_.log_decay.data != nullptr, x.log_decay);
    return x;
  }
  // S <- e^g (I - e k k^T) S + w k v^T
  void advance(const Token& x, Row& state) const {
    const int64_t K = p_.shape.key_dim, V = p_.shape.value_dim;
    const double a = std::exp(x.c.log_gate);
    for (int64_t j = 0; j < V; ++j) {
      double sk = 0;
      for (int64_t i = 0; i < K; ++i) sk += state[i * V + j] * x.k[i];
      const double u = x.c.write * x.v[j] - x.c.erase * a * sk;
      for (int64_t i = 0; i < K; ++i) state[i * V + j] = a * state[i * V + j] + x.k[i] * u;
    }
  }
  Row load_state(const void* base, int64_t offset) const {
    Row r(p_.shape.key_dim * p_.shape.value_dim);
    if (base)
      for (size_t i = 0; i < r.size(); ++i) r[i] = load(base, arith_, offset + i);
    return r;
  }
  void store_state(void* base, int64_t offset, const Row& r) const {
    for (size_t i = 0; i < r.size(); ++i) store(base, arith_, offset + i, r[i]);
  }

  const Problem& p_;
  int64_t n_, hv_, h_, row_, begin_, end_, state_offset_;
  DType arith_;
};

template <typename F>
void each_outside(const Problem& p, F f) {
  if (!p.cu_seqlens) return;
  for (int64_t t = 0; t < p.cu_seqlens[0]; ++t) f(t);
  for (int64_t t = p.cu_seqlens[p.shape.sequences]; t < p.shape.tokens; ++t) f(t);
}

void fill_zero(const MutableView& view, DType dtype, int64_t t, int64_t heads, int64_t dim) {
  if (!view.data) return;
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < dim; ++i)
      store(view.data, dtype, t * view.token + h * view.head + i, 0);
}

// Adds to dx the gradient through y = x * inv, inv = rsqrt(sum x^2 + eps), given y and dy.
void l2norm_backward(const Row& y, double inv, Row& dy) {
  double dot = 0;
  for (size_t i = 0; i < y.size(); ++i) dot += y[i] * dy[i];
  for (size_t i = 0; i < y.size(); ++i) dy[i] = inv * (dy[i] - y[i] * dot);
}

}  // namespace

void chunk_forward(const ForwardParams& params, const Executor& executor) {
  const Problem& p = params.problem;
  const Shape& s = p.shape;
  const int64_t K = s.key_dim, V = s.value_dim;
  each_outside(p, [&](int64_t t) { fill_zero(params.o, p.dtype, t, s.value_heads, V); });
  executor.parallel_for(s.sequences * s.value_heads, [&](int64_t task) {
    const Sequence seq(p, task / s.value_heads, task % s.value_heads);
    Row state = seq.load_state(p.initial_state, seq.state_offset_);
    for (int64_t t = seq.begin_; t < seq.end_; ++t) {
      if (params.checkpoints && (t - seq.begin_) % kCheckpointTokens == 0)
        seq.store_state(params.checkpoints, seq.checkpoint_offset(t), state);
      const Token x = seq.token(t);
      seq.advance(x, state);
      for (int64_t j = 0; j < V; ++j) {
        double o = 0;
        for (int64_t i = 0; i < K; ++i) o += state[i * V + j] * x.q[i];
        store(params.o.data, p.dtype,
              seq.row_ * params.o.batch + t * params.o.token + seq.hv_ * params.o.head + j,
              p.scale * o);
      }
    }
    if (params.final_state) seq.store_state(params.final_state, seq.state_offset_, state);
  });
}

void recurrent_forward(const ForwardParams& params, const Executor& executor) {
  chunk_forward(params, executor);
}

void chunk_backward(const BackwardParams& params, const Executor& executor) {
  const Problem& p = params.problem;
  const Shape& s = p.shape;
  const int64_t K = s.key_dim, V = s.value_dim, group = s.value_heads / s.heads;
  const bool decay = p.log_decay.data != nullptr;
  each_outside(p, [&](int64_t t) {
    const DType arith = p.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    fill_zero(params.grad_q, p.dtype, t, s.heads, K);
    fill_zero(params.grad_k, p.dtype, t, s.heads, K);
    fill_zero(params.grad_v, p.dtype, t, s.value_heads, V);
    fill_zero(params.grad_beta, arith, t, s.value_heads, 1);
    fill_zero(params.grad_log_decay, arith, t, s.value_heads, 1);
  });
  executor.parallel_for(s.sequences * s.heads, [&](int64_t task) {
    const int64_t n = task / s.heads, h = task % s.heads;
    const Sequence first(p, n, h * group);
    const int64_t T = first.end_ - first.begin_;
    std::vector<Row> dq(T, Row(K)), dk(T, Row(K));
    for (int64_t hv = h * group; hv < (h + 1) * group; ++hv) {
      const Sequence seq(p, n, hv);
      Row ds = seq.load_state(params.grad_final_state, seq.state_offset_);
      for (int64_t t0 = (T - 1) / kCheckpointTokens * kCheckpointTokens; T && t0 >= 0;
           t0 -= kCheckpointTokens) {
        const int64_t t1 = std::min(T, t0 + kCheckpointTokens);
        std::vector<Row> states{
            seq.load_state(params.checkpoints, seq.checkpoint_offset(seq.begin_ + t0))};
        for (int64_t t = t0; t < t1; ++t) {
          states.push_back(states.back());
          seq.advance(seq.token(seq.begin_ + t), states.back());
        }
        for (int64_t i = t1 - 1; i >= t0; --i) {
          const int64_t t = seq.begin_ + i;
          const Token x = seq.token(t);
          const Row &before = states[i - t0], &after = states[i - t0 + 1];
          const double a = std::exp(x.c.log_gate);
          StepCoefficients<double> grad{0, 0, 0};
          auto at = [&](const auto& view, int64_t head) {
            return seq.row_ * view.batch + t * view.token + head * view.head;
          };
          for (int64_t j = 0; j < V; ++j) {
            const double go =
                p.scale * load(params.grad_o.data, p.dtype, at(params.grad_o, hv) + j);
            double sk = 0, du = 0;
            for (int64_t m = 0; m < K; ++m) {
              double& d = ds[m * V + j];
              d += x.q[m] * go;
              dq[i][m] += after[m * V + j] * go;
              sk += before[m * V + j] * x.k[m];
              du += d * x.k[m];
              grad.log_gate += a * d * before[m * V + j];
            }
            const double u = x.c.write * x.v[j] - x.c.erase * a * sk;
            for (int64_t m = 0; m < K; ++m) {
              double& d = ds[m * V + j];
              dk[i][m] += d * u - x.c.erase * a * before[m * V + j] * du;
              d = a * d - x.c.erase * a * x.k[m] * du;
            }
            grad.erase -= a * du * sk;
            grad.write += du * x.v[j];
            grad.log_gate -= x.c.erase * a * du * sk;
            if (params.grad_v.data)
              store(params.grad_v.data, p.dtype, at(params.grad_v, hv) + j, x.c.write * du);
          }
          const auto in =
              step_coefficients_backward(p.rule, x.beta, x.lambda, decay, x.log_decay, grad);
          for (int64_t m = 0; m < K; ++m) dk[i][m] += 2 * x.k[m] * in.lambda;
          if (params.grad_beta.data)
            store(params.grad_beta.data, seq.arith_, at(params.grad_beta, hv), in.beta);
          if (params.grad_log_decay.data)
            store(params.grad_log_decay.data, seq.arith_, at(params.grad_log_decay, hv),
                  in.log_decay);
        }
      }
      if (params.grad_initial_state)
        seq.store_state(params.grad_initial_state, seq.state_offset_, ds);
    }
    for (int64_t i = 0; i < T; ++i) {
      const int64_t t = first.begin_ + i;
      const Token x = first.token(t);
      if (p.qk_l2norm) {
        l2norm_backward(x.q, x.q_norm, dq[i]);
        l2norm_backward(x.k, x.k_norm, dk[i]);
      }
      auto put = [&](const MutableView& view, const Row& r) {
        if (!view.data) return;
        for (int64_t m = 0; m < K; ++m)
          store(view.data, p.dtype, first.row_ * view.batch + t * view.token + h * view.head + m,
                r[m]);
      };
      put(params.grad_q, dq[i]);
      put(params.grad_k, dk[i]);
    }
  });
}

}  // namespace efla::cpu
