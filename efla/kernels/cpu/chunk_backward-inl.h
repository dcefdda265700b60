// Backward of one chunk of a block of value columns (docs/mathematics.md, "Chunkwise form"):
//
//   dU = P^T dO + Kt dS_C ,   (I + L)^T dR = dU ,   Kt = diag(exp(G_C - G)) K
//   dP = tril(dO U^T) ,   dL = -strictLower(dR U^T) ,   B = diag(e) (D o dL) ,   Z = dR S0^T
//   dQ = scale (diag(exp(G)) dO S0^T + (D o dP) K)
//   dK = B K + B^T K - diag(e exp(G)) Z + scale (D o dP)^T Q + diag(exp(G_C - G)) U dS_C^T
//   dS0 = exp(G_C) dS_C + scale (diag(exp(G)) Q)^T dO - (diag(e exp(G)) K)^T dR
//
// and the gradients of the scalars e, w, g. All but dV and dS0 sum over value columns, so blocks of
// columns add up. Compiled once per instruction set: include inside a foreach_target.h translation
// unit.

#if defined(EFLA_KERNELS_CPU_CHUNK_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EFLA_KERNELS_CPU_CHUNK_BACKWARD_INL_H_
#undef EFLA_KERNELS_CPU_CHUNK_BACKWARD_INL_H_
#else
#define EFLA_KERNELS_CPU_CHUNK_BACKWARD_INL_H_
#endif

#include <cstdint>
#include <utility>

#include "efla/kernels/cpu/chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace efla::cpu::HWY_NAMESPACE {

/// Where the gradients of a run of tokens of one value head are added up.
template <typename A>
struct KeyGradients {
  A* q;      // [tokens, padded K]
  A* k;      // [tokens, padded K], of Chunk::k() and without the part through lambda = |k|^2
  A* erase;  // [tokens]
  A* write;  // [tokens]
  A* gate;   // [tokens]
};

template <typename S>
class ChunkBackward {
 public:
  using A = Arithmetic<S>;
  using D = hn::ScalableTag<A>;

  ChunkBackward(const Problem& p, int64_t columns)
      : key_dim_(p.shape.key_dim),
        columns_(columns),
        stride_(padded(columns)),
        key_stride_(padded(p.shape.key_dim)),
        erases_(erases(p.rule)),
        has_decay_(p.log_decay.data != nullptr),
        scale_(static_cast<A>(p.scale)),
        memory_(kChunk * (2 * stride_ + columns + 2 * kChunk + 3 * key_stride_) +
                columns * key_stride_) {
    A* next = memory_.get();
    const auto take = [&](int64_t size) { return std::exchange(next, next + size); };
    grad_rows_ = take(2 * kChunk * stride_);
    u_transposed_ = take(kChunk * columns);
    grad_p_ = take(kChunk * kChunk);
    b_ = take(kChunk * kChunk);
    state_products_ = take(2 * kChunk * key_stride_);
    tail_products_ = take(kChunk * key_stride_);
    grad_state_transposed_ = take(columns * key_stride_);
  }

  int64_t stride() const { return stride_; }
  /// dO of the chunk, [size, columns] with row stride stride(): written by the caller before run().
  A* grad_o() { return grad_rows_; }
  /// dR after run(), same layout: dV = diag(w) dR.
  const A* grad_r(const Chunk<S>& chunk) const { return grad_rows_ + chunk.size() * stride_; }

  /// `u` [size, columns]; `state_transposed` [columns, K]: S0^T; `grad_state` [K, columns]: dS_C on
  /// entry, dS0 on return. Adds to `out`, except for out.write, which is the caller's.
  void run(const Chunk<S>& chunk, const A* u, const A* state_transposed, A* grad_state,
           const KeyGradients<A>& out) {
    solve(chunk, grad_state);
    multiply_states(chunk, u, state_transposed, grad_state);
    A grad_gates[kChunk] = {};  // dL/dG
    triangles(chunk, u, out, grad_gates);
    add_state_products(chunk, state_transposed, out, grad_gates);
    add_triangle_products(chunk, out);
    A sum = A(0);
    for (int64_t t = chunk.size() - 1; has_decay_ && t >= 0; --t)
      out.gate[t] += sum += grad_gates[t];
    const int64_t rows = erases_ ? 2 * chunk.size() : chunk.size();
    gemm(D(), Part::kAll, key_dim_, columns_, rows, columns_of(chunk.state_rows(), key_stride_),
         grad_rows_, stride_, grad_state, stride_, chunk.decay());
  }

 private:
  // dR from dO and dS_C.
  void solve(const Chunk<S>& chunk, const A* grad_state) {
    const D d;
    const int64_t n = chunk.size();
    A* grad_r = grad_rows_ + n * stride_;
    gemm(d, Part::kUpperLeft, n, columns_, n, columns_of(chunk.p(), kChunk), grad_rows_, stride_,
         grad_r, stride_, A(0));
    gemm(d, Part::kAll, n, columns_, key_dim_, rows_of(chunk.tail_keys(), key_stride_), grad_state,
         stride_, grad_r, stride_, A(1));
    if (erases_) solve_lower_transposed(d, n, columns_, chunk.minus_l(), kChunk, grad_r, stride_);
  }

  // [dO S0^T ; Z] and U dS_C^T.
  void multiply_states(const Chunk<S>& chunk, const A* u, const A* state_transposed,
                       const A* grad_state) {
    const D d;
    const int64_t n = chunk.size();
    transpose(key_dim_, columns_, grad_state, stride_, grad_state_transposed_, key_stride_);
    gemm(d, Part::kAll, n, key_dim_, columns_, rows_of(u, stride_), grad_state_transposed_,
         key_stride_, tail_products_, key_stride_, A(0));
    gemm(d, Part::kAll, erases_ ? 2 * n : n, key_dim_, columns_, rows_of(grad_rows_, stride_),
         state_transposed, key_stride_, state_products_, key_stride_, A(0));
  }

  // grad_p_ = scale D o dP, b_ = B, and their parts of the gradients of e and G.
  void triangles(const Chunk<S>& chunk, const A* u, const KeyGradients<A>& out, A* grad_gates) {
    const D d;
    const int64_t n = chunk.size(), lanes = hn::Lanes(d);
    transpose(n, columns_, u, stride_, u_transposed_, kChunk);
    gemm(d, Part::kLowerResult, n, n, columns_, rows_of(grad_rows_, stride_), u_transposed_, kChunk,
         grad_p_, kChunk, A(0));
    if (erases_)
      gemm(d, Part::kLowerResult, n, n, columns_, rows_of(grad_r(chunk), stride_), u_transposed_,
           kChunk, b_, kChunk, A(0));
    HWY_ALIGN A column_sums[kChunk] = {};
    for (int64_t t = 0; t < n; ++t) {
      const int64_t row = t * kChunk;
      const auto erase = hn::Set(d, chunk.coefficients(t).erase);
      auto grad_erase = hn::Zero(d), grad_gate = hn::Zero(d);
      for (int64_t i = row; i < row + kChunk; i += lanes) {
        const auto decay = hn::Load(d, chunk.decay_matrix() + i);
        const auto outside = hn::Eq(decay, hn::Zero(d));
        const auto dp = hn::IfThenZeroElse(outside, hn::Load(d, grad_p_ + i));
        hn::Store(hn::Mul(hn::Mul(hn::Set(d, scale_), decay), dp), d, grad_p_ + i);
        auto pair = hn::Mul(dp, hn::Load(d, chunk.p() + i));  // N, then N + B o K K^T
        if (erases_) {
          const auto dl = hn::Neg(hn::IfThenZeroElse(outside, hn::Load(d, b_ + i)));
          hn::Store(hn::Mul(hn::Mul(erase, decay), dl), d, b_ + i);
          const auto dl_kk = hn::Mul(dl, hn::Load(d, chunk.key_products() + i));
          grad_erase = hn::Add(grad_erase, dl_kk);
          pair = hn::MulAdd(erase, dl_kk, pair);
        }
        grad_gate = hn::Add(grad_gate, pair);
        A* sums = column_sums + (i - row);
        hn::Store(hn::Add(hn::Load(d, sums), pair), d, sums);
      }
      b_[row + t] = A(0);
      out.erase[t] += hn::GetLane(hn::SumOfLanes(d, grad_erase));
      grad_gates[t] += hn::GetLane(hn::SumOfLanes(d, grad_gate));
    }
    for (int64_t t = 0; t < n; ++t) grad_gates[t] -= column_sums[t];
  }

  // The terms of dQ, dK, de, dG that come through S0 and dS_C.
  void add_state_products(const Chunk<S>& chunk, const A* state_transposed,
                          const KeyGradients<A>& out, A* grad_gates) {
    const D d;
    const int64_t n = chunk.size(), lanes = hn::Lanes(d);
    for (int64_t t = 0; t < n; ++t) {
      const int64_t row = t * key_stride_;
      const A* through_o = state_products_ + row;                    // (dO S0^T)_t
      const A* through_r = state_products_ + (n + t) * key_stride_;  // Z_t
      const A head = chunk.head_factor(t), erase = chunk.coefficients(t).erase;
      const auto q_factor = hn::Set(d, scale_ * head), z_factor = hn::Set(d, -erase * head);
      const auto tail = hn::Set(d, chunk.tail_factor(t));
      auto q_dot = hn::Zero(d), z_dot = hn::Zero(d), tail_dot = hn::Zero(d);
      for (int64_t i = 0; i < key_stride_; i += lanes) {
        const auto k = hn::Load(d, chunk.k() + row + i);
        const auto o = hn::Load(d, through_o + i);
        hn::Store(hn::MulAdd(q_factor, o, hn::Load(d, out.q + row + i)), d, out.q + row + i);
        const auto x = hn::Load(d, tail_products_ + row + i);
        auto dk = hn::MulAdd(tail, x, hn::Load(d, out.k + row + i));
        if (erases_) {
          const auto z = hn::Load(d, through_r + i);
          dk = hn::MulAdd(z_factor, z, dk);
          z_dot = hn::MulAdd(z, k, z_dot);
        }
        hn::Store(dk, d, out.k + row + i);
        if (!has_decay_) continue;
        q_dot = hn::MulAdd(o, hn::Load(d, chunk.q() + row + i), q_dot);
        tail_dot = hn::MulAdd(x, k, tail_dot);
      }
      const A z_k = head * hn::GetLane(hn::SumOfLanes(d, z_dot));
      out.erase[t] -= z_k;
      if (!has_decay_) continue;
      const A from_tail = chunk.tail_factor(t) * hn::GetLane(hn::SumOfLanes(d, tail_dot));
      grad_gates[t] +=
          scale_ * head * hn::GetLane(hn::SumOfLanes(d, q_dot)) - erase * z_k - from_tail;
      grad_gates[n - 1] += from_tail;
    }
    if (has_decay_)
      grad_gates[n - 1] +=
          chunk.decay() * dot(d, state_transposed, grad_state_transposed_, columns_ * key_stride_);
  }

  // The terms of dQ and dK that come through P and L.
  void add_triangle_products(const Chunk<S>& chunk, const KeyGradients<A>& out) {
    const D d;
    const int64_t n = chunk.size();
    const auto add = [&](Part part, Left<A> left, const A* right, A* sum) HWY_ATTR {
      gemm(d, part, n, key_dim_, n, left, right, key_stride_, sum, key_stride_, A(1));
    };
    add(Part::kLowerLeft, rows_of(grad_p_, kChunk), chunk.k(), out.q);
    add(Part::kUpperLeft, columns_of(grad_p_, kChunk), chunk.q(), out.k);
    if (!erases_) return;
    add(Part::kLowerLeft, rows_of(b_, kChunk), chunk.k(), out.k);
    add(Part::kUpperLeft, columns_of(b_, kChunk), chunk.k(), out.k);
  }

  const int64_t key_dim_, columns_, stride_, key_stride_;
  const bool erases_, has_decay_;
  const A scale_;
  Scratch<A> memory_;
  A* grad_rows_;              // [2 size, columns]: dO, then dR
  A* u_transposed_;           // [columns, kChunk]
  A* grad_p_;                 // [size, kChunk]
  A* b_;                      // [size, kChunk]
  A* state_products_;         // [2 size, K]: dO S0^T, then Z
  A* tail_products_;          // [size, K]: U dS_C^T
  A* grad_state_transposed_;  // [columns, K]
};

}  // namespace efla::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
