// What the tests of the CUDA kernels share: cases, device buffers, problems with their float64
// reference.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "efla/flow/reference.h"
#include "efla/kernels/cuda/delta_rule.h"
#include "efla/kernels/cuda/portable/chunk_backward.h"

namespace efla::cuda {

#define CUDA_OK(call) ASSERT_EQ((call), cudaSuccess) << cudaGetErrorString(cudaGetLastError())

struct Case {
  std::string name;
  int64_t batch, tokens, heads, value_heads, key_dim, value_dim;
  Rule rule = Rule::kExact;
  bool decay = false, l2norm = false, initial = true;
  std::vector<int64_t> cu_seqlens = {};
  double log_norm_spread = 1.0;  // key norms are e^uniform(-spread, spread)
  double slack = 1.0;      // on 16-bit tolerances, where few numbers do not average their roundings
  bool zero_keys = false;  // every fifth
  bool long_keys = false;  // every seventh: 1e10 to 1e38 times as long (half: 100)
  double beta_slack = 1.0;      // as slack, for beta's gradient alone
  double strongest_gate = 0.3;  // log decays are uniform in (-this, 0)
  bool tiny_betas = false;      // every third: the smallest floats there are
};

inline const std::pair<const char*, Rule> kNamedRules[] = {
    {"Linear", Rule::kLinear}, {"Euler", Rule::kEuler}, {"Rk2", Rule::kRk2},
    {"Rk4", Rule::kRk4},       {"Exact", Rule::kExact}, {"ExactLog", Rule::kExactLog}};

inline std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

template <typename T>
std::vector<T> rounded(std::vector<double>& x) {
  std::vector<T> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    y[i] = T(static_cast<float>(x[i]));
    x[i] = static_cast<double>(static_cast<float>(y[i]));
  }
  return y;
}

// Device memory that holds a copy of a vector, or NaN bytes.
template <typename T>
class Buffer {
 public:
  explicit Buffer(const std::vector<T>& host) : size_(host.size()) {
    cudaMalloc(&data_, size_ * sizeof(T) + 16);
    cudaMemcpy(data_, host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice);
  }
  explicit Buffer(size_t size) : size_(size) {
    cudaMalloc(&data_, size_ * sizeof(T) + 16);
    cudaMemset(data_, 0xff, size_ * sizeof(T));  // NaN in every float type
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data_); }
  T* data() { return data_; }
  std::vector<T> host() const {
    std::vector<T> out(size_);
    cudaMemcpy(out.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost);
    return out;
  }

 private:
  size_t size_;
  T* data_ = nullptr;
};

template <typename T>
double relative_rms(const std::vector<T>& x, const std::vector<double>& reference) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    const double d = static_cast<double>(static_cast<float>(x[i])) - reference[i];
    error += d * d;
    norm += reference[i] * reference[i];
  }
  return std::sqrt(error / (norm + 1e-30));
}

template <typename T>
struct Setup {
  ReferenceProblem reference;
  Problem problem;
  std::vector<T> q, k, v;
  std::vector<float> beta, log_decay, state;
  std::unique_ptr<Buffer<T>> dq, dk, dv;
  std::unique_ptr<Buffer<float>> dbeta, ddecay, dstate;
  std::unique_ptr<Buffer<int64_t>> dcu;
};

template <typename T>
constexpr DType dtype_of() {
  if (std::is_same_v<T, float>) return DType::kFloat32;
  return std::is_same_v<T, __half> ? DType::kFloat16 : DType::kBFloat16;
}

template <typename T>
void make(const Case& c, Setup<T>& s) {
  std::mt19937 rng(7);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  auto& r = s.reference;
  r.batch = c.batch, r.tokens = c.tokens, r.heads = c.heads, r.value_heads = c.value_heads;
  r.key_dim = c.key_dim, r.value_dim = c.value_dim, r.rule = c.rule;
  r.qk_l2norm = c.l2norm, r.scale = 1 / std::sqrt(double(c.key_dim)), r.cu_seqlens = c.cu_seqlens;
  const auto fill = [&](std::vector<double>& x, int64_t n) {
    x.resize(n);
    for (auto& e : x) e = normal(rng);
  };
  const int64_t rows = c.batch * c.tokens;
  fill(r.q, rows * c.heads * c.key_dim);
  fill(r.k, rows * c.heads * c.key_dim);
  for (int64_t i = 0; i < rows * c.heads; ++i) {
    const double target = std::exp(c.log_norm_spread * (2 * uniform(rng) - 1));
    double factor = c.zero_keys && i % 5 == 2 ? 0.0 : target / std::sqrt(c.key_dim);
    if (c.long_keys && i % 7 == 3) {
      constexpr double kLengths[] = {1e10, 1e19, 1e25, 1e38};
      factor *= std::is_same_v<T, __half> ? 100.0 : kLengths[i / 7 % 4];
    }
    for (int64_t d = 0; d < c.key_dim; ++d) r.k[i * c.key_dim + d] *= factor;
  }
  fill(r.v, rows * c.value_heads * c.value_dim);
  r.beta.resize(rows * c.value_heads);
  for (size_t i = 0; i < r.beta.size(); ++i) {
    r.beta[i] = uniform(rng);
    if (c.tiny_betas && i % 3 == 1) r.beta[i] = 4e-44;
  }
  if (c.decay) {
    r.log_decay.resize(rows * c.value_heads);
    for (auto& e : r.log_decay) e = -c.strongest_gate * uniform(rng);
  }
  if (c.initial) fill(r.initial_state, r.sequences() * c.value_heads * c.key_dim * c.value_dim);
  s.q = rounded<T>(r.q), s.k = rounded<T>(r.k), s.v = rounded<T>(r.v);
  s.beta = rounded<float>(r.beta), s.log_decay = rounded<float>(r.log_decay);
  s.state = rounded<float>(r.initial_state);
  s.dq = std::make_unique<Buffer<T>>(s.q), s.dk = std::make_unique<Buffer<T>>(s.k);
  s.dv = std::make_unique<Buffer<T>>(s.v), s.dbeta = std::make_unique<Buffer<float>>(s.beta);
  s.ddecay = std::make_unique<Buffer<float>>(s.log_decay);
  s.dstate = std::make_unique<Buffer<float>>(s.state);
  s.dcu = std::make_unique<Buffer<int64_t>>(c.cu_seqlens);

  Problem& p = s.problem;
  p.shape = {c.batch, c.tokens, c.heads, c.value_heads, c.key_dim, c.value_dim, r.sequences()};
  p.dtype = dtype_of<T>(), p.rule = c.rule, p.scale = r.scale, p.qk_l2norm = c.l2norm;
  const auto view = [&](const void* data, int64_t heads, int64_t dim) {
    return View{data, c.tokens * heads * dim, heads * dim, dim};
  };
  p.q = view(s.dq->data(), c.heads, c.key_dim), p.k = view(s.dk->data(), c.heads, c.key_dim);
  p.v = view(s.dv->data(), c.value_heads, c.value_dim);
  p.beta = view(s.dbeta->data(), c.value_heads, 1);
  if (c.decay) p.log_decay = view(s.ddecay->data(), c.value_heads, 1);
  if (c.initial) p.initial_state = s.dstate->data();
  if (!c.cu_seqlens.empty()) p.cu_seqlens = s.dcu->data();
}

// Every gradient against the reference's; with a plan, under that split of the sequences, and with
// `kept` from what a forward has left.
template <typename T>
void check_backward(const Case& c, double tolerance, Family family,
                    const sm90::ScanPlan* plan = nullptr, bool kept = false) {
  if (sizeof(T) == 2) tolerance *= c.slack;
  Setup<T> s;
  make(c, s);
  std::mt19937 rng(11);
  std::normal_distribution<double> normal;
  const ReferenceProblem& r = s.reference;
  std::vector<double> grad_o(r.batch * r.tokens * r.value_heads * r.value_dim);
  std::vector<double> grad_state(r.sequences() * r.value_heads * r.key_dim * r.value_dim);
  for (auto& e : grad_o) e = normal(rng);
  for (auto& e : grad_state) e = normal(rng);
  const auto host_grad_o = rounded<T>(grad_o);
  const auto host_grad_state = rounded<float>(grad_state);
  const ReferenceGradients expected = reference_backward(r, grad_o, grad_state);

  Buffer<T> device_grad_o(host_grad_o), q(r.q.size()), k(r.k.size()), v(r.v.size());
  Buffer<float> device_grad_state(host_grad_state), beta(r.beta.size()), decay(r.beta.size()),
      state(grad_state.size());
  const auto view = [&](void* data, int64_t heads, int64_t dim) {
    return MutableView{data, c.tokens * heads * dim, heads * dim, dim};
  };
  BackwardParams params;
  params.problem = s.problem;
  params.grad_o = {device_grad_o.data(), c.tokens * c.value_heads * c.value_dim,
                   c.value_heads * c.value_dim, c.value_dim};
  params.grad_final_state = device_grad_state.data();
  params.grad_q = view(q.data(), c.heads, c.key_dim);
  params.grad_k = view(k.data(), c.heads, c.key_dim);
  params.grad_v = view(v.data(), c.value_heads, c.value_dim);
  params.grad_beta = view(beta.data(), c.value_heads, 1);
  if (c.decay) params.grad_log_decay = view(decay.data(), c.value_heads, 1);
  params.grad_initial_state = state.data();
  const int64_t bytes = !kept  ? 0
                        : plan ? sm90::checkpoint_bytes(s.problem, *plan)
                               : chunk_checkpoint_bytes(params, family);
  Buffer<unsigned char> checkpoints(bytes);
  if (kept) {
    ASSERT_GT(bytes, 0);
    Buffer<T> o(r.v.size());
    ForwardParams forward;
    forward.problem = s.problem;
    forward.o = view(o.data(), c.value_heads, c.value_dim);
    forward.checkpoints = checkpoints.data();
    Buffer<unsigned char> scratch(plan ? sm90::scan_workspace(s.problem, *plan, true)
                                       : chunk_forward_workspace(forward, family));
    CUDA_OK(plan ? sm90::scan_forward(forward, *plan, scratch.data(), nullptr)
                 : chunk_forward(forward, scratch.data(), nullptr, family));
    params.checkpoints = checkpoints.data();
  }
  Buffer<unsigned char> workspace(plan ? chunk_backward_workspace(params, *plan, family)
                                       : chunk_backward_workspace(params, family));
  CUDA_OK(plan ? chunk_backward(params, *plan, workspace.data(), nullptr, family)
               : chunk_backward(params, workspace.data(), nullptr, family));
  CUDA_OK(cudaDeviceSynchronize());
  EXPECT_LE(relative_rms(q.host(), expected.q), tolerance) << "q";
  EXPECT_LE(relative_rms(k.host(), expected.k), tolerance) << "k";
  EXPECT_LE(relative_rms(v.host(), expected.v), tolerance) << "v";
  const double beta_tolerance = sizeof(T) == 2 ? tolerance * c.beta_slack : tolerance;
  EXPECT_LE(relative_rms(beta.host(), expected.beta), beta_tolerance) << "beta";
  if (c.decay) EXPECT_LE(relative_rms(decay.host(), expected.log_decay), tolerance) << "log_decay";
  EXPECT_LE(relative_rms(state.host(), expected.initial_state), tolerance) << "initial state";
  if (kept) {  // they are what it comes from
    cudaMemset(checkpoints.data(), 0xff, bytes);
    CUDA_OK(plan ? chunk_backward(params, *plan, workspace.data(), nullptr, family)
                 : chunk_backward(params, workspace.data(), nullptr, family));
    CUDA_OK(cudaDeviceSynchronize());
    EXPECT_TRUE(std::isnan(relative_rms(q.host(), expected.q)));
  }
}

// Skips where there is no GPU.
class DeltaRule : public testing::TestWithParam<Case> {
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "no CUDA device here";
    }
  }
};

}  // namespace efla::cuda
