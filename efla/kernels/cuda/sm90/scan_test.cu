// The Hopper scan and its backward against the float64 reference under every plan. All but
// AdvanceShare needs a GPU of compute capability 9.0 (label gpu), and skips without one.

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <tuple>

#include "efla/kernels/cuda/delta_rule_test.h"
#include "efla/kernels/cuda/sm90/advance_share.cuh"
#include "efla/kernels/cuda/sm90/backward.h"

namespace efla::cuda {
namespace {

std::vector<Case> cases() {
  const auto packed = std::vector<int64_t>{0, 0, 15, 100, 100, 229, 293, 293};
  std::vector<Case> all = {
      {"One", 1, 1, 1, 1, 128, 128, Rule::kExact, false, false, true, {}, 1.0, 4.0},
      {"PartChunk", 1, 63, 1, 1, 128, 128},
      {"OneChunk", 1, 64, 1, 2, 128, 128},
      {"OneMore", 2, 65, 2, 2, 128, 128},
      {"Long", 1, 700, 2, 2, 128, 128},
      {"NoState", 1, 330, 1, 1, 128, 128, Rule::kExact, false, false, false},
      {"Grouped", 2, 200, 2, 6, 64, 64},
      {"ManyTiles", 40, 70, 2, 4, 128, 128},
      {"L2Norm", 1, 200, 2, 2, 128, 128, Rule::kExact, false, true},
      {"Packed", 1, 300, 2, 2, 128, 128, Rule::kExact, false, false, true, packed},
      {"PackedNarrow", 1, 300, 1, 2, 64, 64, Rule::kExact, true, false, true, packed},
      {"PartChunkNarrow", 1, 63, 1, 1, 64, 64},
      {"OneMoreNarrow", 2, 65, 2, 2, 64, 64},
      {"LongNarrow", 1, 700, 2, 2, 64, 64},
      {"NoStateNarrow", 1, 330, 1, 1, 64, 64, Rule::kExact, false, false, false},
      {"PackedLater",
       1,
       300,
       1,
       1,
       128,
       128,
       Rule::kExact,
       false,
       false,
       true,
       {3, 64, 128, 128, 300}},
      // More walks of parts than multiprocessors, which are shared out within parts (128 tokens).
      {"ManyParts", 1, 700, 2, 16, 128, 128, Rule::kExact, true},
      {"ManyPartsNarrow", 2, 520, 9, 9, 64, 64},
      {"ManyPartsPacked",
       1,
       1500,
       5,
       10,
       128,
       128,
       Rule::kExact,
       false,
       false,
       true,
       {0, 0, 300, 700, 700, 1490}},
      {"Norms", 1, 256, 1, 1, 128, 128, Rule::kExact, false, false, true, {}, 6.0},
      // Just within what counts as mild in the forward, and some chunks within, some not.
      {"MildNorms", 1, 256, 1, 1, 128, 128, Rule::kExact, false, false, true, {}, 4.0},
      {"MildNormsNorm", 1, 256, 1, 1, 128, 128, Rule::kEuler, false, true, true, {}, 4.0},
      {"SomeMildNorms", 1, 520, 2, 2, 128, 128, Rule::kExact, false, false, true, {}, 4.2},
  };
  // Sizes that are padded: alone and together, keys narrower and wider than values.
  for (const auto& [name, key_dim, value_dim] : {std::tuple{"32", 32, 32},
                                                 {"80", 80, 80},
                                                 {"96", 96, 96},
                                                 {"40x104", 40, 104},
                                                 {"104x40", 104, 40},
                                                 {"64x128", 64, 128},
                                                 {"128x64", 128, 64}}) {
    const std::string size = std::string("Head") + name;
    all.push_back({size, 2, 150, 2, 2, key_dim, value_dim});
    all.push_back(
        {size + "GroupedDecay", 1, 200, 2, 6, key_dim, value_dim, Rule::kExact, true, true});
    all.push_back({size + "Packed", 1, 300, 1, 2, key_dim, value_dim, Rule::kExactLog, true, false,
                   true, packed});
  }
  all.push_back({"Head8", 2, 200, 2, 4, 8, 8, Rule::kExact, false, false, true, {}, 1.0, 2.0});
  all.push_back({"Head48NoState", 1, 330, 1, 1, 48, 48, Rule::kExact, false, false, false});
  all.push_back({"Head120ManyTiles", 40, 70, 2, 4, 120, 120});
  // beta's gradient comes from a few tokens there: half of its square sum from 1 of 256 numbers in
  // "Norms", 3 of 1040 in "SomeMildNorms" (39 of 1400 in "Long"). With bfloat16 operands and an
  // exact inverse the first is wrong by 2e-3 to 2e-2, by the draw; the second, split, was
  // by 6.2e-3. All else keeps the bounds.
  for (Case& c : all) {
    if (c.name == "Norms") c.beta_slack = 4.0;
    if (c.name == "SomeMildNorms") c.beta_slack = 1.1;
  }
  all.push_back({"ZeroKeys", 1, 200, 1, 2, 128, 128});
  all.back().zero_keys = true;
  // The forward leaves decays to what comes later (kFoldedFactors): over many chunks, gates that
  // take all there is room for in a chunk, that take more in every chunk or in some, keys at the
  // edge of what is mild.
  for (const auto& [name, rule, gate, spread] : {std::tuple{"ManyChunks", Rule::kExact, 0.3, 1.0},
                                                 {"StrongGates", Rule::kExact, 3.0, 1.0},
                                                 {"StrongGatesLog", Rule::kExactLog, 1.5, 1.0},
                                                 {"SomeStrongGates", Rule::kExactLog, 2.0, 1.0},
                                                 {"StrongestGates", Rule::kEuler, 6.0, 1.0},
                                                 {"SomeMildNormsDecay", Rule::kExactLog, 0.3, 4.2},
                                                 {"NormsStrongGates", Rule::kExact, 2.0, 6.0}}) {
    all.push_back(
        {name, 1, 1100, 1, 1, 128, 128, rule, true, rule == Rule::kEuler, true, {}, spread});
    all.back().strongest_gate = gate;
  }
  // Beside strong gates w / E of such a token has no divisor left.
  all.push_back({"TinyBetas", 1, 300, 1, 2, 128, 128, Rule::kExactLog, true});
  all.back().tiny_betas = true;
  all.back().strongest_gate = 1.0;
  for (const Case& c : {Case{"LongKeys", 1, 300, 1, 2, 128, 128},
                        Case{"LongKeysDecay", 1, 300, 2, 2, 128, 128, Rule::kExact, true},
                        Case{"LongKeysNarrow", 1, 300, 2, 2, 64, 64, Rule::kExactLog, true},
                        Case{"LongKeysNorm", 1, 300, 1, 1, 64, 64, Rule::kEuler, false, true}}) {
    all.push_back(c);
    all.back().long_keys = true;
  }
  for (const auto& [name, rule] : kNamedRules) {
    const bool rk = rule == Rule::kRk2 || rule == Rule::kRk4;
    all.push_back({std::string("Rule") + name, 1, 300, 2, 2, 128, 128, rule, false, true});
    all.push_back({std::string("Narrow") + name, 2, 150, 2, 2, 64, 64, rule, false, true});
    all.push_back({std::string("Padded") + name, 2, 150, 2, 2, 88, 72, rule, false, true});
    if (!rk) {
      all.push_back({std::string("Decay") + name, 1, 300, 2, 2, 128, 128, rule, true, true});
      all.push_back({std::string("NarrowDecay") + name, 1, 300, 2, 2, 64, 64, rule, true, true});
    }
  }
  return all;
}

bool is_hopper() {
  int major = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  return major == 9;
}

template <typename T>
void check(const Case& c, const sm90::ScanPlan& plan, double tolerance) {
  if (!is_hopper()) GTEST_SKIP() << "not a device of compute capability 9.0";
  tolerance *= c.slack;
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
  ASSERT_TRUE(sm90::scan_applies(params));
  // Rows of no sequence are the caller's.
  if (!c.cu_seqlens.empty()) cudaMemset(o.data(), 0, expected.o.size() * sizeof(T));
  Buffer<unsigned char> workspace(sm90::scan_workspace(s.problem, plan));
  CUDA_OK(sm90::scan_forward(params, plan, workspace.data(), nullptr));
  CUDA_OK(cudaDeviceSynchronize());
  EXPECT_LE(relative_rms(o.host(), expected.o), tolerance) << "o";
  EXPECT_LE(relative_rms(final_state.host(), expected.final_state), tolerance) << "final state";
}

sm90::ScanPlan whole(const Case& c) { return {sm90::padded_dim(c.value_dim), 0, 0}; }

int square_dim(const Case& c) { return sm90::padded_dim(std::max(c.key_dim, c.value_dim)); }

sm90::ScanPlan split(const Case& c, int value_tile, int64_t part_tokens) {
  const bool packed = !c.cu_seqlens.empty();
  const int64_t per = (c.tokens + part_tokens - 1) / part_tokens;
  const int64_t sequences = packed ? static_cast<int64_t>(c.cu_seqlens.size()) - 1 : c.batch;
  return {value_tile, part_tokens, packed ? per + sequences : per * sequences};
}

using Scan = DeltaRule;

TEST_P(Scan, WholeBFloat16) { check<__nv_bfloat16>(GetParam(), whole(GetParam()), 4e-3); }
TEST_P(Scan, WholeHalf) { check<__half>(GetParam(), whole(GetParam()), 2e-3); }
TEST_P(Scan, NarrowTilesBFloat16) { check<__nv_bfloat16>(GetParam(), {64, 0, 0}, 4e-3); }
TEST_P(Scan, PartsOfOneChunkBFloat16) {
  check<__nv_bfloat16>(GetParam(), split(GetParam(), 64, 64), 4e-3);
}
TEST_P(Scan, PartsBFloat16) {
  check<__nv_bfloat16>(GetParam(), split(GetParam(), square_dim(GetParam()), 128), 4e-3);
}
TEST_P(Scan, PartsHalf) {
  check<__half>(GetParam(), split(GetParam(), square_dim(GetParam()), 128), 2e-3);
}

TEST_P(Scan, GradientsBFloat16) { check_backward<__nv_bfloat16>(GetParam(), 6e-3, Family::kAuto); }
TEST_P(Scan, GradientsHalf) { check_backward<__half>(GetParam(), 3e-3, Family::kAuto); }

INSTANTIATE_TEST_SUITE_P(Cases, Scan, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

// The backward in parts so short that most of dS goes through their transitions.
class SplitBackward : public DeltaRule {};

template <typename T>
void check_split_backward(const Case& c, int64_t part_tokens, double tolerance, bool kept = false) {
  const sm90::ScanPlan plan = split(c, square_dim(c), part_tokens);
  check_backward<T>(c, tolerance, Family::kAuto, &plan, kept);
}

TEST_P(SplitBackward, PartsOfOneChunkBFloat16) {
  check_split_backward<__nv_bfloat16>(GetParam(), 64, 6e-3);
}
TEST_P(SplitBackward, PartsBFloat16) { check_split_backward<__nv_bfloat16>(GetParam(), 128, 6e-3); }
TEST_P(SplitBackward, KeptPartsBFloat16) {
  if (!is_hopper()) GTEST_SKIP() << "not a device of compute capability 9.0";
  check_split_backward<__nv_bfloat16>(GetParam(), 128, 6e-3, true);
}
TEST_P(SplitBackward, PartsOfOneChunkHalf) { check_split_backward<__half>(GetParam(), 64, 3e-3); }

INSTANTIATE_TEST_SUITE_P(Cases, SplitBackward, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

// Few heads and long sequences, which are split by themselves.
std::vector<Case> long_cases() {
  const auto packed = std::vector<int64_t>{1, 1, 41, 4500, 4500, 4507};
  return {
      {"OneMoreThanTwoParts", 1, 2049, 1, 1, 128, 128},
      {"Odd", 1, 8999, 1, 1, 128, 128, Rule::kExact, false, true},
      {"NoState", 1, 3000, 1, 1, 128, 128, Rule::kExact, false, false, false},
      {"TwoRows", 2, 2500, 1, 1, 128, 128},
      {"GroupedDecay", 1, 3333, 1, 2, 128, 128, Rule::kExactLog, true},
      {"Linear", 1, 2200, 1, 1, 128, 128, Rule::kLinear},
      {"LinearDecay", 1, 2200, 1, 1, 128, 128, Rule::kLinear, true},
      {"Packed", 1, 4510, 1, 1, 128, 128, Rule::kExact, false, false, true, packed},
      {"PackedGroupedDecay", 1, 4510, 1, 2, 128, 128, Rule::kExact, true, false, false, packed},
      {"OddNarrow", 1, 5999, 1, 1, 64, 64, Rule::kExact, false, true},
      {"PackedGroupedDecayNarrow", 1, 4510, 1, 2, 64, 64, Rule::kExact, true, false, true, packed},
      {"Head96", 1, 2200, 1, 2, 96, 96},
      {"Head40x104Packed", 1, 4510, 1, 1, 40, 104, Rule::kExact, true, true, true, packed},
      {"Head104x24", 1, 2300, 1, 1, 104, 24, Rule::kLinear, true},
  };
}

class LongBackward : public DeltaRule {};

TEST_P(LongBackward, IsSplit) {
  if (!is_hopper()) GTEST_SKIP() << "not a device of compute capability 9.0";
  efla::cuda::Setup<__half> s;
  make(GetParam(), s);
  const sm90::ScanPlan plan = sm90::plan_backward(s.problem);
  EXPECT_GT(plan.part_tokens, 0);
  EXPECT_LE(2 * plan.part_tokens, GetParam().tokens);
}

TEST_P(LongBackward, GradientsBFloat16) {
  check_backward<__nv_bfloat16>(GetParam(), 6e-3, Family::kAuto);
}
TEST_P(LongBackward, KeptBFloat16) {
  if (!is_hopper()) GTEST_SKIP() << "not a device of compute capability 9.0";
  check_backward<__nv_bfloat16>(GetParam(), 6e-3, Family::kAuto, nullptr, true);
}
TEST_P(LongBackward, GradientsHalf) { check_backward<__half>(GetParam(), 3e-3, Family::kAuto); }

INSTANTIATE_TEST_SUITE_P(Cases, LongBackward, testing::ValuesIn(long_cases()),
                         [](const auto& info) { return info.param.name; });

// How kAdvance's walks are shared out, without a device: every chunk of every job once and in
// order, what is handed over so early that nobody takes longer than a share.
RC_GTEST_PROP(AdvanceShare, EveryChunkOnceAndInOrder, ()) {
  const int length = *rc::gen::inRange(1, 70), jobs_n = *rc::gen::inRange(1, 400);
  const int jobs[2] = {jobs_n, *rc::gen::inRange(0, jobs_n + 1)};
  const int processors = *rc::gen::element(1, 3, 16, 132, 200);
  const auto blocks = static_cast<int>(sm90::advance_blocks(2 * jobs_n, processors));
  std::vector<int> walked[2];  // chunks of each job so far
  for (int line = 0; line < 2; ++line) walked[line].resize(jobs[line]);
  sm90::JobRun ahead{};  // what the block before does first
  bool ahead_values = false;
  int longest = 0;  // share
  for (int block = 0; block < blocks; ++block) {
    const auto share = sm90::share_line(jobs[0] * length, jobs[1] * length, length, blocks, block);
    longest = std::max(longest, share.end - share.begin);
    int number = 0, n = 0;
    sm90::JobRun opening{};
    for (sm90::JobRun run; (run = sm90::find_run(share, length, n)).job >= 0; ++n) {
      RC_ASSERT(n < sm90::kMostRuns);
      RC_ASSERT(run.job < jobs[!share.values]);
      RC_ASSERT(0 <= run.first && run.first < run.last && run.last <= length);
      RC_ASSERT(run.from == number);
      int& done = walked[!share.values][run.job];
      RC_ASSERT(done == run.first);
      if (run.first > 0) {  // it goes on where the block before has broken off, by then
        RC_ASSERT(share.values == ahead_values && run.job == ahead.job && ahead.last == run.first);
        const int begins = std::max(run.from, ahead.last - ahead.first);
        RC_ASSERT(begins + run.last - run.first <= longest);
        RC_ASSERT(sm90::find_run(share, length, n + 1).job < 0);
      }
      if (run.last < length) RC_ASSERT(n == 0);
      if (n == 0) opening = run;
      done = run.last;
      number += run.last - run.first;
    }
    ahead = opening, ahead_values = share.values;
  }
  for (const auto& line : walked) {
    for (const int done : line) RC_ASSERT(done == length);
  }
}

// However few processors, a block's runs can be listed.
TEST(AdvanceShare, ListsAreLongEnough) {
  for (int jobs = 1; jobs < 300; ++jobs) {
    const auto blocks = static_cast<int>(sm90::advance_blocks(2 * jobs, 1));
    for (int block = 0; block < blocks; ++block) {
      const auto share = sm90::share_line(2 * jobs, 2 * jobs, 2, blocks, block);
      ASSERT_LT(sm90::find_run(share, 2, sm90::kMostRuns).job, 0) << jobs << ", " << block;
    }
  }
}

TEST(Dispatch, HeadSizesOfBothFamilies) {
  if (!is_hopper()) GTEST_SKIP() << "not a device of compute capability 9.0";
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    const auto expect = [&](int64_t key_dim, int64_t value_dim, bool hopper) {
      SCOPED_TRACE(testing::Message() << key_dim << "x" << value_dim);
      efla::cuda::Setup<__half> s;
      make({"", 1, 70, 1, 1, key_dim, value_dim}, s);
      BackwardParams backward;
      backward.problem = s.problem;
      backward.problem.dtype = dtype;
      EXPECT_EQ(sm90::backward_applies(backward), hopper);
      ForwardParams forward;
      forward.problem = backward.problem;
      const View& v = s.problem.v;
      forward.o = {s.dv->data(), v.batch, v.token, v.head};
      EXPECT_EQ(sm90::scan_applies(forward), hopper);
      // Whole sequences need no workspace there.
      EXPECT_EQ(chunk_forward_workspace(forward) == 0, hopper);
      EXPECT_GT(chunk_forward_workspace(forward, Family::kPortable), 0);
    };
    const bool sixteen_bits = dtype != DType::kFloat32;
    for (const int64_t dim : {8, 32, 64, 72, 96, 128}) expect(dim, dim, sixteen_bits);
    expect(64, 128, sixteen_bits);
    expect(104, 40, sixteen_bits);
    expect(60, 64, false);
    expect(64, 100, false);
    expect(136, 128, false);
    expect(128, 136, false);
    expect(1, 1, false);
  }
}

}  // namespace
}  // namespace efla::cuda
