// The CUDA kernels against the float64 reference on the same rounded inputs, every output poisoned
// with NaN first. Needs a GPU (label gpu).

#include "efla/kernels/cuda/delta_rule_test.h"

#include <algorithm>

#include "efla/kernels/cuda/delta_rule.h"

namespace efla::cuda {
namespace {

// K above 128, where 16-bit tensors have kernels of their own (portable/split_scan.cuh).
std::vector<Case> wide_cases() {
  std::vector<Case> all = {
      {"Wide", 1, 200, 1, 1, 256, 128},
      {"WideShort", 1, 33, 1, 2, 256, 256},
      {"WideGrouped", 2, 130, 1, 2, 256, 72, Rule::kExactLog, true},
      {"WideOdd", 1, 100, 2, 2, 131, 67, Rule::kExact, false, true},
      {"WidePacked",
       1,
       300,
       1,
       2,
       192,
       64,
       Rule::kEuler,
       true,
       true,
       true,
       {0, 0, 15, 100, 100, 290}},
      {"WideNorms", 1, 256, 1, 1, 256, 64, Rule::kExact, false, false, true, {}, 6.0},
  };
  all.push_back({"WideLongKeys", 1, 130, 1, 1, 200, 64, Rule::kExact, true});
  all.back().long_keys = true;
  all.push_back({"WideLongKeysNorm", 1, 130, 1, 1, 256, 40, Rule::kExact, false, true});
  all.back().long_keys = true;
  return all;
}

std::vector<Case> cases() {
  std::vector<Case> all = {
      {"One", 1, 1, 1, 1, 64, 64, Rule::kExact, false, false, true, {}, 1.0, 4.0},
      {"Short", 2, 5, 2, 2, 64, 64},
      {"PartChunk", 1, 63, 1, 1, 128, 128},
      {"OneChunk", 1, 64, 2, 2, 128, 128},
      {"OneMore", 1, 65, 2, 2, 128, 128},
      {"Long", 1, 700, 2, 2, 128, 128},
      {"NoState", 1, 130, 1, 1, 128, 64, Rule::kExact, false, false, false},
      {"Grouped", 2, 130, 2, 6, 64, 64},
      {"OddSizes", 2, 70, 2, 2, 60, 100},
      {"Tiny", 2, 70, 1, 2, 7, 3, Rule::kExact, false, false, true, {}, 1.0, 2.0},
      {"ManyTiles", 50, 70, 2, 2, 64, 100},
      {"ManyHeads", 6, 70, 16, 16, 96, 128},
      {"WideValue", 1, 100, 1, 1, 128, 512},
      {"Head32", 1, 200, 2, 2, 32, 32},
      {"Head24Decay", 2, 130, 1, 2, 24, 40, Rule::kExactLog, true, true},
      {"Head96", 1, 200, 2, 2, 96, 96},
      {"L2Norm", 1, 200, 2, 2, 128, 128, Rule::kExact, false, true},
      {"Packed",
       1,
       300,
       2,
       2,
       64,
       64,
       Rule::kExact,
       false,
       false,
       true,
       {0, 0, 15, 100, 100, 229, 290, 290}},
      {"PackedDecay",
       1,
       300,
       2,
       4,
       128,
       64,
       Rule::kExactLog,
       true,
       false,
       true,
       {3, 64, 128, 128, 300}},
      {"Norms", 1, 256, 1, 1, 128, 128, Rule::kExact, false, false, true, {}, 6.0},
  };
  all.push_back({"ZeroKeys", 1, 200, 1, 2, 128, 128});
  all.back().zero_keys = true;
  all.push_back({"LongKeys", 1, 200, 1, 2, 128, 128});
  all.back().long_keys = true;
  all.push_back({"LongKeysDecay", 2, 100, 2, 2, 60, 100, Rule::kExactLog, true});
  all.back().long_keys = true;
  all.push_back({"LongKeysNorm", 1, 130, 1, 1, 64, 64, Rule::kEuler, false, true});
  all.back().long_keys = true;
  for (const Case& c : wide_cases()) all.push_back(c);
  for (const auto& [name, rule] : kNamedRules) {
    const bool rk = rule == Rule::kRk2 || rule == Rule::kRk4;
    all.push_back({std::string("Rule") + name, 1, 150, 2, 2, 64, 64, rule, false, true});
    if (!rk)
      all.push_back({std::string("RuleDecay") + name, 1, 150, 2, 2, 64, 64, rule, true, true});
  }
  return all;
}

enum class Kernel { kRecurrent, kChunk };

template <typename T>
void check(const Case& c, Kernel kernel, double tolerance, Family family = Family::kPortable) {
  if (sizeof(T) == 2) tolerance *= c.slack;
  Setup<T> s;
  make(c, s);
  const ReferenceResult expected = reference_forward(s.reference);
  Buffer<T> o(expected.o.size());
  Buffer<float> final_state(expected.final_state.size());
  ForwardParams params;
  params.problem = s.problem;
  params.o = {o.data(), c.tokens * c.value_heads * c.value_dim, c.value_heads * c.value_dim,
              c.value_dim};
  params.final_state = final_state.data();
  if (kernel == Kernel::kChunk) {
    Buffer<unsigned char> workspace(chunk_forward_workspace(params, family));
    CUDA_OK(chunk_forward(params, workspace.data(), nullptr, family));
    CUDA_OK(cudaDeviceSynchronize());
  } else {
    CUDA_OK(recurrent_forward(params, nullptr));
    CUDA_OK(cudaDeviceSynchronize());
  }
  EXPECT_LE(relative_rms(o.host(), expected.o), tolerance) << "o";
  EXPECT_LE(relative_rms(final_state.host(), expected.final_state), tolerance) << "final state";
}

TEST_P(DeltaRule, RecurrentFloat) { check<float>(GetParam(), Kernel::kRecurrent, 1e-5); }
TEST_P(DeltaRule, RecurrentBFloat16) { check<__nv_bfloat16>(GetParam(), Kernel::kRecurrent, 4e-3); }
TEST_P(DeltaRule, RecurrentHalf) { check<__half>(GetParam(), Kernel::kRecurrent, 1e-3); }
TEST_P(DeltaRule, ChunkFloat) { check<float>(GetParam(), Kernel::kChunk, 1e-5); }
TEST_P(DeltaRule, ChunkBFloat16) { check<__nv_bfloat16>(GetParam(), Kernel::kChunk, 4e-3); }
TEST_P(DeltaRule, ChunkHalf) { check<__half>(GetParam(), Kernel::kChunk, 2e-3); }
TEST_P(DeltaRule, BackwardFloat) { check_backward<float>(GetParam(), 2e-5, Family::kPortable); }
TEST_P(DeltaRule, BackwardBFloat16) {
  check_backward<__nv_bfloat16>(GetParam(), 6e-3, Family::kPortable);
}
TEST_P(DeltaRule, BackwardHalf) { check_backward<__half>(GetParam(), 3e-3, Family::kPortable); }

// The kernels that devices with less shared memory than an H200's run.
class SmallDevice : public DeltaRule {};

TEST_P(SmallDevice, BFloat16) {
  check<__nv_bfloat16>(GetParam(), Kernel::kChunk, 4e-3, Family::kPortableSmall);
  check_backward<__nv_bfloat16>(GetParam(), 6e-3, Family::kPortableSmall);
}
TEST_P(SmallDevice, Half) {
  check<__half>(GetParam(), Kernel::kChunk, 2e-3, Family::kPortableSmall);
  check_backward<__half>(GetParam(), 3e-3, Family::kPortableSmall);
}

// step on a pool whose rows are in another order, with one row of padding.
template <typename T, typename State>
void check_step(const Case& c, double tolerance, double state_tolerance) {
  if (sizeof(T) == 2) tolerance *= c.slack;
  Setup<T> s;
  make(c, s);
  ReferenceProblem& r = s.reference;
  const std::vector<State> initial = rounded<State>(r.initial_state);
  const ReferenceResult expected = reference_forward(r);
  const int64_t size = c.value_heads * c.key_dim * c.value_dim, padding = c.batch / 2;
  const int64_t outside = c.batch % 2 ? -1 : c.batch + 1;  // before or behind the pool
  const auto slot = [&](int64_t b) { return b == padding ? outside : c.batch - b; };
  std::vector<int64_t> indices(c.batch);
  std::vector<State> pool((c.batch + 1) * size, State(0.5f));
  std::vector<double> o = expected.o, states(pool.size(), 0.5);
  for (int64_t b = 0; b < c.batch; ++b) {
    indices[b] = slot(b);
    if (b == padding) {
      const auto row = o.begin() + b * c.tokens * c.value_heads * c.value_dim;
      std::fill(row, row + c.tokens * c.value_heads * c.value_dim, 0.0);
    } else {
      std::copy_n(initial.begin() + b * size, size, pool.begin() + slot(b) * size);
      std::copy_n(expected.final_state.begin() + b * size, size, states.begin() + slot(b) * size);
    }
  }
  Buffer<State> device_pool(pool);
  Buffer<int64_t> device_indices(indices);
  Buffer<T> device_o(o.size());
  StepParams params;
  params.problem = s.problem;
  params.o = {device_o.data(), c.tokens * c.value_heads * c.value_dim, c.value_heads * c.value_dim,
              c.value_dim};
  params.state = device_pool.data();
  params.state_dtype = dtype_of<State>();
  params.pool_size = c.batch + 1;
  params.state_indices = device_indices.data();
  CUDA_OK(step(params, nullptr));
  CUDA_OK(cudaDeviceSynchronize());
  EXPECT_LE(relative_rms(device_o.host(), o), tolerance) << "o";
  EXPECT_LE(relative_rms(device_pool.host(), states), state_tolerance) << "states";
}

class Step : public DeltaRule {};

TEST_P(Step, Float) { check_step<float, float>(GetParam(), 1e-5, 1e-5); }
TEST_P(Step, BFloat16) { check_step<__nv_bfloat16, float>(GetParam(), 4e-3, 1e-5); }
TEST_P(Step, BFloat16States) { check_step<__nv_bfloat16, __nv_bfloat16>(GetParam(), 4e-3, 4e-3); }
TEST_P(Step, HalfStates) { check_step<__half, __half>(GetParam(), 1e-3, 1e-3); }

std::vector<Case> step_cases() {
  std::vector<Case> all = {
      {"Few", 3, 1, 1, 2, 128, 128, Rule::kExact, true},
      {"Many", 25, 1, 2, 4, 128, 128, Rule::kExact, true},
      {"ManyTokens", 25, 8, 2, 4, 128, 64, Rule::kExactLog, true, true},
      {"Few64", 3, 8, 1, 2, 64, 32},
      {"Many64", 50, 1, 1, 2, 64, 64},
      {"Odd", 3, 2, 1, 2, 60, 7},
      {"Halfway", 3, 2, 1, 2, 100, 100},
      {"WideKey", 2, 3, 1, 1, 250, 32},
      {"WidestKey", 2, 5, 1, 2, 512, 64, Rule::kEuler, true, true},
      {"WidestOdd", 2, 2, 1, 1, 500, 33},
  };
  all.push_back({"LongKeys", 30, 3, 1, 4, 128, 128});
  all.back().long_keys = true;
  all.push_back({"LongKeysNorm", 4, 3, 2, 2, 128, 128, Rule::kEuler, false, true});
  all.back().long_keys = true;
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cases, Step, testing::ValuesIn(step_cases()),
                         [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(Cases, SmallDevice, testing::ValuesIn(wide_cases()),
                         [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(Cases, DeltaRule, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace efla::cuda
