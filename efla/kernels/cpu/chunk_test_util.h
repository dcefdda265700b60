// Runs a test problem through the CPU kernels: typed buffers in several layouts, poisoned outputs,
// results as doubles.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <vector>

#include "efla/kernels/cpu/delta_rule.h"
#include "efla/kernels/cpu/storage.h"
#include "efla/kernels/test_cases.h"

namespace efla::testing {

/// A tensor [B, T, H, D] of any storage type in a layout of its own.
class Tensor {
 public:
  enum class Layout { kDense, kHeadFirst };  // kHeadFirst: [H, T, B, D + 3], as a strided view

  Tensor(DType dtype, int64_t b, int64_t t, int64_t h, int64_t d, Layout layout) : dtype_(dtype) {
    size_[0] = b, size_[1] = t, size_[2] = h, size_[3] = d;
    if (layout == Layout::kDense) {
      stride_[2] = d, stride_[1] = h * d, stride_[0] = t * h * d;
    } else {
      stride_[0] = d + 3, stride_[1] = b * (d + 3), stride_[2] = t * b * (d + 3);
    }
    bytes_.resize(static_cast<size_t>(b * t * h * (d + 3)) * element_size());
    fill(std::numeric_limits<double>::quiet_NaN());
  }

  size_t element_size() const {
    return dtype_ == DType::kFloat64 ? 8 : dtype_ == DType::kBFloat16 ? 2 : 4;
  }
  View view() const { return {bytes_.data(), stride_[0], stride_[1], stride_[2]}; }
  MutableView view() { return {bytes_.data(), stride_[0], stride_[1], stride_[2]}; }
  const std::vector<char>& bytes() const { return bytes_; }

  /// From and to the dense order [B, T, H, D].
  Tensor& set(const std::vector<double>& x) {
    size_t i = 0;
    each([&](int64_t offset) { put(offset, x[i++]); });
    return *this;
  }
  std::vector<double> get() const {
    std::vector<double> x;
    each([&](int64_t offset) { x.push_back(read(offset)); });
    return x;
  }
  void fill(double value) {
    for (size_t i = 0; i < bytes_.size() / element_size(); ++i) put(static_cast<int64_t>(i), value);
  }

 private:
  template <typename F>
  void each(F&& f) const {
    for (int64_t b = 0; b < size_[0]; ++b)
      for (int64_t t = 0; t < size_[1]; ++t)
        for (int64_t h = 0; h < size_[2]; ++h)
          for (int64_t d = 0; d < size_[3]; ++d)
            f(b * stride_[0] + t * stride_[1] + h * stride_[2] + d);
  }
  void put(int64_t i, double value) {
    cpu::dispatch_storage(dtype_, [&](auto tag) {
      using S = decltype(tag);
      reinterpret_cast<S*>(bytes_.data())[i] =
          cpu::from_arithmetic<S>(static_cast<cpu::Arithmetic<S>>(value));
    });
  }
  double read(int64_t i) const {
    double value = 0;
    cpu::dispatch_storage(dtype_, [&](auto tag) {
      value = cpu::to_arithmetic(reinterpret_cast<const decltype(tag)*>(bytes_.data())[i]);
    });
    return value;
  }

  DType dtype_;
  int64_t size_[4], stride_[4];
  std::vector<char> bytes_;
};

/// An executor that splits for `threads` threads and runs the parts one after the other.
inline Executor serial(int threads) {
  Executor executor;
  executor.threads = threads;
  return executor;
}

enum class Form { kChunk, kRecurrent };

/// One problem in typed buffers. forward() and backward() may be called again.
class KernelRun {
 public:
  KernelRun(const KernelInputs& in, DType dtype, Tensor::Layout layout = Tensor::Layout::kDense)
      : reference_(in.problem),
        arithmetic_(arithmetic_type(dtype)),
        q(dtype, B(), T(), H(), K(), layout),
        k(dtype, B(), T(), H(), K(), layout),
        v(dtype, B(), T(), HV(), V(), layout),
        o(dtype, B(), T(), HV(), V(), layout),
        grad_o(dtype, B(), T(), HV(), V(), layout),
        grad_q(dtype, B(), T(), H(), K(), layout),
        grad_k(dtype, B(), T(), H(), K(), layout),
        grad_v(dtype, B(), T(), HV(), V(), layout),
        beta(arithmetic_, B(), T(), HV(), 1, layout),
        log_decay(arithmetic_, B(), T(), HV(), 1, layout),
        grad_beta(arithmetic_, B(), T(), HV(), 1, layout),
        grad_log_decay(arithmetic_, B(), T(), HV(), 1, layout),
        initial_state(states()),
        final_state(states()),
        grad_final_state(states()),
        grad_initial_state(states()),
        checkpoints(arithmetic_, 1, checkpoint_rows(shape(), !reference_.cu_seqlens.empty()), HV(),
                    K() * V(), Tensor::Layout::kDense) {
    q.set(reference_.q), k.set(reference_.k), v.set(reference_.v), beta.set(reference_.beta);
    grad_o.set(in.grad_o);
    if (!in.grad_final_state.empty()) grad_final_state.set(in.grad_final_state);
    if (!reference_.log_decay.empty()) log_decay.set(reference_.log_decay);
    if (!reference_.initial_state.empty()) initial_state.set(reference_.initial_state);
    problem.shape = shape();
    problem.dtype = dtype;
    problem.rule = reference_.rule;
    problem.scale = reference_.scale;
    problem.qk_l2norm = reference_.qk_l2norm;
    problem.q = std::as_const(q).view();
    problem.k = std::as_const(k).view();
    problem.v = std::as_const(v).view();
    problem.beta = std::as_const(beta).view();
    if (!reference_.log_decay.empty()) problem.log_decay = std::as_const(log_decay).view();
    if (!reference_.initial_state.empty()) problem.initial_state = initial_state.view().data;
    if (!reference_.cu_seqlens.empty()) problem.cu_seqlens = reference_.cu_seqlens.data();
  }
  KernelRun(const KernelRun&) = delete;

  void forward(Form form, const Executor& executor) {
    ForwardParams params;
    params.problem = problem;
    params.o = o.view();
    params.final_state = final_state.view().data;
    params.checkpoints = checkpoints.view().data;
    (form == Form::kChunk ? cpu::chunk_forward : cpu::recurrent_forward)(params, executor);
  }

  void backward(const Executor& executor) {
    BackwardParams params;
    params.problem = problem;
    params.grad_o = std::as_const(grad_o).view();
    params.grad_final_state = grad_final_state.view().data;
    params.checkpoints = checkpoints.view().data;
    params.grad_q = grad_q.view();
    params.grad_k = grad_k.view();
    params.grad_v = grad_v.view();
    params.grad_beta = grad_beta.view();
    if (problem.log_decay.data) params.grad_log_decay = grad_log_decay.view();
    params.grad_initial_state = grad_initial_state.view().data;
    cpu::chunk_backward(params, executor);
  }

  std::vector<std::vector<char>> gradient_bytes() const {
    return {grad_q.bytes(),    grad_k.bytes(),         grad_v.bytes(),
            grad_beta.bytes(), grad_log_decay.bytes(), grad_initial_state.bytes()};
  }

 private:
  int64_t B() const { return reference_.batch; }
  int64_t T() const { return reference_.tokens; }
  int64_t H() const { return reference_.heads; }
  int64_t HV() const { return reference_.value_heads; }
  int64_t K() const { return reference_.key_dim; }
  int64_t V() const { return reference_.value_dim; }
  Shape shape() const { return {B(), T(), H(), HV(), K(), V(), reference_.sequences()}; }
  Tensor states() const {
    return Tensor(arithmetic_, reference_.sequences(), HV(), K(), V(), Tensor::Layout::kDense);
  }

  ReferenceProblem reference_;
  DType arithmetic_;

 public:
  Tensor q, k, v, o, grad_o, grad_q, grad_k, grad_v;
  Tensor beta, log_decay, grad_beta, grad_log_decay;
  Tensor initial_state, final_state, grad_final_state, grad_initial_state, checkpoints;
  Problem problem;
};

}  // namespace efla::testing
