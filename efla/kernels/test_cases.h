// The table of problems that every kernel of this room is tested on, whatever the device, and the
// inputs that go with each.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "efla/flow/reference.h"
#include "efla/kernels/params.h"

namespace efla::testing {

struct KernelCase {
  std::string name = {};
  int64_t tokens = 70;
  int64_t key_dim = 32;
  int64_t value_dim = 32;
  Rule rule = Rule::kExact;
  bool decay = false;
  int64_t batch = 1;
  int64_t heads = 1;
  int64_t value_heads = 1;
  bool qk_l2norm = false;
  bool initial_state = true;
  double key_norm = 1.0;                 // root mean square of |k|
  std::vector<int64_t> cu_seqlens = {};  // empty: dense
};

/// How GoogleTest names a case in a failure.
inline void PrintTo(const KernelCase& c, std::ostream* out) { *out << c.name; }

/// Lengths round the chunk and segment sizes, odd and large heads, every rule, grouped value heads,
/// packed sequences with empty ones and slack rows.
inline std::vector<KernelCase> kernel_cases() {
  std::vector<KernelCase> cases;
  for (int64_t t : {1, 2, 5, 31, 32, 33, 63, 64, 65, 130, 700})
    cases.push_back({.name = "T" + std::to_string(t), .tokens = t, .decay = t % 2 == 0});
  constexpr int64_t kDims[][2] = {{1, 1},    {7, 60},    {60, 7},   {100, 100}, {64, 128},
                                  {128, 64}, {128, 128}, {512, 20}, {20, 512},  {512, 512}};
  for (const auto& [k, v] : kDims)
    cases.push_back({.name = "K" + std::to_string(k) + "V" + std::to_string(v),
                     .tokens = k * v > 100000 ? 40 : 70,
                     .key_dim = k,
                     .value_dim = v,
                     .decay = k > v});
  for (Rule rule : kAllRules) {
    for (bool decay : {false, true}) {
      if (decay && (rule == Rule::kRk2 || rule == Rule::kRk4)) continue;
      cases.push_back({.name = std::string(rule_name(rule)) + (decay ? "_decay" : ""),
                       .tokens = 90,
                       .rule = rule,
                       .decay = decay,
                       .batch = 2,
                       .heads = 2,
                       .value_heads = 2});
    }
  }
  cases.push_back({.name = "grouped",
                   .decay = true,
                   .batch = 2,
                   .heads = 2,
                   .value_heads = 6,
                   .qk_l2norm = true});
  cases.push_back({.name = "l2norm", .key_dim = 60, .qk_l2norm = true, .key_norm = 3.0});
  cases.push_back({.name = "no_state", .value_dim = 60, .decay = true, .initial_state = false});
  cases.push_back({.name = "large_keys", .key_norm = 30.0});
  cases.push_back({.name = "small_keys", .decay = true, .key_norm = 0.01});
  cases.push_back({.name = "packed",
                   .tokens = 110,
                   .decay = true,
                   .heads = 2,
                   .value_heads = 4,
                   .cu_seqlens = {0, 0, 33, 33, 34, 98, 98}});
  cases.push_back({.name = "packed_slack",
                   .tokens = 700,
                   .value_dim = 60,
                   .heads = 1,
                   .value_heads = 2,
                   .qk_l2norm = true,
                   .cu_seqlens = {3, 3, 600, 690, 690}});
  cases.push_back(
      {.name = "all_empty", .tokens = 4, .heads = 1, .value_heads = 2, .cu_seqlens = {2, 2, 2}});
  return cases;
}

/// Rounds to the storage type, to nearest even.
inline double rounded(double x, DType dtype) {
  if (dtype == DType::kFloat64) return x;
  const float f = static_cast<float>(x);
  if (dtype == DType::kFloat32) return f;
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  return std::bit_cast<float>((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u);
}

inline DType arithmetic_type(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

/// What the kernels read and the gradients that come in.
struct KernelInputs {
  ReferenceProblem problem;
  std::vector<double> grad_o, grad_final_state;
};

/// Random inputs, exactly representable in `dtype` (scalars and states in its arithmetic type).
inline KernelInputs make_inputs(const KernelCase& c, DType dtype, uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  const auto fill = [&](std::vector<double>& x, int64_t size, DType type, auto&& draw) {
    x.resize(static_cast<size_t>(size));
    for (double& value : x) value = rounded(draw(), type);
  };
  const auto gaussian = [&](double deviation) {
    return [&normal, &random, deviation] { return deviation * normal(random); };
  };
  KernelInputs in;
  ReferenceProblem& p = in.problem;
  p.batch = c.batch;
  p.tokens = c.tokens;
  p.heads = c.heads;
  p.value_heads = c.value_heads;
  p.key_dim = c.key_dim;
  p.value_dim = c.value_dim;
  p.rule = c.rule;
  p.scale = rounded(1 / std::sqrt(static_cast<double>(c.key_dim)), DType::kFloat32);
  p.qk_l2norm = c.qk_l2norm;
  p.cu_seqlens = c.cu_seqlens;
  const DType scalar = arithmetic_type(dtype);
  const int64_t rows = c.batch * c.tokens;
  const int64_t states = p.sequences() * c.value_heads * c.key_dim * c.value_dim;
  fill(p.q, rows * c.heads * c.key_dim, dtype, gaussian(1));
  fill(p.k, rows * c.heads * c.key_dim, dtype,
       gaussian(c.key_norm / std::sqrt(static_cast<double>(c.key_dim))));
  fill(p.v, rows * c.value_heads * c.value_dim, dtype, gaussian(1));
  fill(p.beta, rows * c.value_heads, scalar, [&] { return uniform(random); });
  if (c.decay)
    fill(p.log_decay, rows * c.value_heads, scalar,
         [&] { return (uniform(random) < 0.1 ? -6 : -0.3) * uniform(random); });
  if (c.initial_state) fill(p.initial_state, states, scalar, gaussian(0.5));
  fill(in.grad_o, rows * c.value_heads * c.value_dim, dtype, gaussian(1));
  fill(in.grad_final_state, states, scalar, gaussian(0.5));
  return in;
}

/// |x - reference| / |reference|; NaN if x holds one.
inline double relative_error(const std::vector<double>& x, const std::vector<double>& reference) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    difference += (x[i] - reference[i]) * (x[i] - reference[i]);
    norm += reference[i] * reference[i];
  }
  if (difference == 0) return 0;
  return std::sqrt(difference / std::max(norm, 1e-30));
}

}  // namespace efla::testing
