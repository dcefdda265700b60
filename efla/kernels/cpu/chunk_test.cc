// The chunkwise and the recurrent kernels against the double-precision reference, on every
// instruction set of this machine.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <bit>
#include <cmath>
#include <limits>
#include <thread>

#include "efla/kernels/cpu/chunk_test_util.h"
#include "efla/kernels/cpu/targets.h"
#include "hwy/highway.h"
#include "hwy/targets.h"

namespace efla::testing {
namespace {

/// Runs body() once per instruction set that was compiled in and that this machine has.
template <typename F>
void on_every_target(F&& body) {
  for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    body();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

Executor threaded(int threads) {
  Executor executor;
  executor.threads = threads;
  executor.parallel_for = [threads](int64_t count, const std::function<void(int64_t)>& body) {
    std::vector<std::thread> pool;
    for (int i = 0; i < threads; ++i)
      pool.emplace_back([&, i] {
        for (int64_t task = count - 1 - i; task >= 0; task -= threads) body(task);
      });
    for (std::thread& thread : pool) thread.join();
  };
  return executor;
}

struct Tolerance {
  double output;
  double gradient;
};

Tolerance tolerance(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return {1e-13, 1e-12};
    case DType::kBFloat16:
      return {3e-3, 4e-3};
    default:
      return {3e-6, 1e-5};
  }
}

#define EXPECT_NEAR_REFERENCE(tensor, reference, bound) \
  EXPECT_LE(relative_error((tensor).get(), (reference)), bound) << #tensor

void expect_forward(const KernelRun& run, const ReferenceResult& expected, double bound) {
  EXPECT_NEAR_REFERENCE(run.o, expected.o, bound);
  EXPECT_NEAR_REFERENCE(run.final_state, expected.final_state, bound);
}

void expect_backward(const KernelRun& run, const ReferenceGradients& expected, double bound) {
  EXPECT_NEAR_REFERENCE(run.grad_q, expected.q, bound);
  EXPECT_NEAR_REFERENCE(run.grad_k, expected.k, bound);
  EXPECT_NEAR_REFERENCE(run.grad_v, expected.v, bound);
  EXPECT_NEAR_REFERENCE(run.grad_beta, expected.beta, bound);
  if (run.problem.log_decay.data) {
    EXPECT_NEAR_REFERENCE(run.grad_log_decay, expected.log_decay, bound);
  }
  EXPECT_NEAR_REFERENCE(run.grad_initial_state, expected.initial_state, bound);
}

class ChunkCase : public ::testing::TestWithParam<KernelCase> {};

TEST_P(ChunkCase, MatchesReference) {
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16}) {
    SCOPED_TRACE(static_cast<int>(dtype));
    const KernelInputs in = make_inputs(GetParam(), dtype);
    const ReferenceResult forward = reference_forward(in.problem);
    const ReferenceGradients gradients =
        reference_backward(in.problem, in.grad_o, in.grad_final_state);
    const Tolerance bound = tolerance(dtype);
    on_every_target([&] {
      KernelRun run(in, dtype);
      run.forward(Form::kRecurrent, serial(1));
      expect_forward(run, forward, bound.output);
      run.forward(Form::kChunk, serial(1));
      expect_forward(run, forward, bound.output);
      run.backward(serial(1));
      expect_backward(run, gradients, bound.gradient);
    });
    // Strided views, and more threads than heads: the value dimension and the group are split.
    KernelRun run(in, dtype, Tensor::Layout::kHeadFirst);
    run.forward(Form::kRecurrent, serial(7));
    expect_forward(run, forward, bound.output);
    run.backward(serial(7));  // from the recurrence's checkpoints
    expect_backward(run, gradients, bound.gradient);
    run.forward(Form::kChunk, serial(7));
    expect_forward(run, forward, bound.output);
  }
}

INSTANTIATE_TEST_SUITE_P(Table, ChunkCase, ::testing::ValuesIn(kernel_cases()),
                         [](const auto& info) { return info.param.name; });

const KernelCase kGrouped = {.name = "grouped",
                             .tokens = 530,
                             .key_dim = 48,
                             .value_dim = 100,
                             .decay = true,
                             .batch = 2,
                             .heads = 1,
                             .value_heads = 2};

TEST(Chunk, ForwardIsBitwiseTheSameForAnyNumberOfThreads) {
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16}) {
    on_every_target([&] {
      const KernelInputs in = make_inputs(kGrouped, dtype);
      for (Form form : {Form::kChunk, Form::kRecurrent}) {
        KernelRun one(in, dtype);
        one.forward(form, serial(1));
        for (int threads : {2, 5, 64}) {
          KernelRun many(in, dtype);
          many.forward(form, threaded(threads));
          EXPECT_EQ(many.o.bytes(), one.o.bytes()) << threads;
          EXPECT_EQ(many.final_state.bytes(), one.final_state.bytes()) << threads;
          EXPECT_EQ(many.checkpoints.bytes(), one.checkpoints.bytes()) << threads;
        }
      }
    });
  }
}

TEST(Chunk, BackwardIsDeterministic) {
  const KernelInputs in = make_inputs(kGrouped, DType::kFloat32);
  for (int threads : {1, 3, 16}) {
    KernelRun first(in, DType::kFloat32), second(in, DType::kFloat32);
    for (KernelRun* run : {&first, &second}) run->forward(Form::kChunk, serial(1));
    first.backward(serial(threads));
    second.backward(threaded(threads));
    EXPECT_EQ(first.gradient_bytes(), second.gradient_bytes()) << threads;
  }
}

TEST(Chunk, RowsDoNotDependOnTheirNeighbours) {
  KernelCase both = kGrouped, alone = kGrouped;
  both.value_heads = 1;
  alone.value_heads = alone.batch = 1;
  KernelInputs in = make_inputs(alone, DType::kFloat32);
  KernelInputs two = make_inputs(both, DType::kFloat32);
  const auto second_row = [](std::vector<double>& to, const std::vector<double>& from) {
    std::fill_n(to.begin(), from.size(), std::numeric_limits<double>::quiet_NaN());
    std::copy(from.begin(), from.end(), to.begin() + from.size());
  };
  second_row(two.problem.q, in.problem.q);
  second_row(two.problem.k, in.problem.k);
  second_row(two.problem.v, in.problem.v);
  second_row(two.problem.beta, in.problem.beta);
  second_row(two.problem.log_decay, in.problem.log_decay);
  second_row(two.problem.initial_state, in.problem.initial_state);
  for (Form form : {Form::kChunk, Form::kRecurrent}) {
    KernelRun single(in, DType::kFloat32), pair(two, DType::kFloat32);
    single.forward(form, serial(1));
    pair.forward(form, serial(1));
    const std::vector<double> o = single.o.get(), o_pair = pair.o.get();
    EXPECT_TRUE(std::equal(o.begin(), o.end(), o_pair.begin() + o.size()));
  }
}

TEST(Chunk, StateHandOverEqualsTheWhole) {
  // Chunks start where sequences start, so a split at a multiple of the chunk keeps every bit.
  const KernelCase whole_case = {.name = "whole", .tokens = 130, .decay = true};
  const KernelInputs whole = make_inputs(whole_case, DType::kFloat32);
  KernelRun run(whole, DType::kFloat32);
  run.forward(Form::kChunk, serial(1));
  const std::vector<double> o = run.o.get();
  for (int64_t split : {64, 50}) {
    KernelInputs part = whole;
    std::vector<double> joined, state = whole.problem.initial_state;
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, split}, {split, 130}}) {
      const auto slice = [&, b = begin, e = end](const std::vector<double>& x) {
        const int64_t row = static_cast<int64_t>(x.size()) / 130;
        return std::vector<double>(x.begin() + b * row, x.begin() + e * row);
      };
      part.problem.tokens = end - begin;
      part.problem.q = slice(whole.problem.q);
      part.problem.k = slice(whole.problem.k);
      part.problem.v = slice(whole.problem.v);
      part.problem.beta = slice(whole.problem.beta);
      part.problem.log_decay = slice(whole.problem.log_decay);
      part.problem.initial_state = state;
      part.grad_o = slice(whole.grad_o);
      KernelRun piece(part, DType::kFloat32);
      piece.forward(Form::kChunk, serial(1));
      const std::vector<double> o_piece = piece.o.get();
      joined.insert(joined.end(), o_piece.begin(), o_piece.end());
      state = piece.final_state.get();
    }
    if (split == 64) {
      EXPECT_EQ(joined, o);
      EXPECT_EQ(state, run.final_state.get());
    }
    EXPECT_LE(relative_error(joined, o), 1e-6);
    EXPECT_LE(relative_error(state, run.final_state.get()), 1e-6);
  }
}

// Keys of norm e^-6 to e^6 in one sequence, beta |k|^2 up to 1e6, zero keys, zero beta, runs of
// nearly equal keys: the exact step contracts, so nothing may grow.
KernelInputs hard_inputs(int64_t tokens, bool decay) {
  KernelCase c = {.name = "hard", .tokens = tokens, .key_dim = 64, .value_dim = 16, .decay = decay};
  KernelInputs in = make_inputs(c, DType::kFloat32);
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> uniform(-1, 1);
  for (int64_t t = 0; t < tokens; ++t) {
    double* k = in.problem.k.data() + t * c.key_dim;
    if (t % 8 > 4)
      for (int64_t i = 0; i < c.key_dim; ++i) k[i] = k[i - c.key_dim] + 1e-3 * k[i];
    double norm = 0;
    for (int64_t i = 0; i < c.key_dim; ++i) norm += k[i] * k[i];
    double wanted = t % 8 > 4 ? std::sqrt(norm) : std::exp(6 * uniform(random));
    if (t % 97 == 13) wanted = 0;
    for (int64_t i = 0; i < c.key_dim; ++i)
      k[i] = norm > 0 ? rounded(k[i] * wanted / std::sqrt(norm), DType::kFloat32) : 0.0;
    if (t % 31 == 5) in.problem.beta[t] = 0;
    if (t % 29 == 3)
      in.problem.beta[t] = rounded(1e6 / std::max(wanted * wanted, 1.0), DType::kFloat32);
  }
  return in;
}

TEST(Chunk, ExactRulesStayFiniteAndAccurateForAnyKeyNorm) {
  for (const auto& [rule, decay] :
       {std::pair{Rule::kExact, false}, {Rule::kExact, true}, {Rule::kExactLog, true}}) {
    KernelInputs in = hard_inputs(4096, decay);
    in.problem.rule = rule;
    const ReferenceResult forward = reference_forward(in.problem);
    const ReferenceGradients gradients =
        reference_backward(in.problem, in.grad_o, in.grad_final_state);
    on_every_target([&] {
      KernelRun run(in, DType::kFloat32);
      run.forward(Form::kRecurrent, serial(1));
      expect_forward(run, forward, 2e-4);
      run.forward(Form::kChunk, serial(1));
      expect_forward(run, forward, 2e-4);
      run.backward(serial(1));
      expect_backward(run, gradients, 2e-3);
    });
  }
}

TEST(Chunk, StrongDecayDoesNotBlurLaterTokens) {
  KernelCase c = {.name = "decay", .tokens = 64, .rule = Rule::kEuler, .decay = true};
  KernelInputs in = make_inputs(c, DType::kFloat32);
  in.problem.log_decay[3] = -1e6;
  in.problem.log_decay[40] = -200;
  KernelRun run(in, DType::kFloat32);
  run.forward(Form::kChunk, serial(1));
  expect_forward(run, reference_forward(in.problem), 3e-6);
  run.backward(serial(1));
  expect_backward(run, reference_backward(in.problem, in.grad_o, in.grad_final_state), 1e-5);
}

TEST(Chunk, DecayOfAnyStrengthErasesOnlyWhatWasBefore) {
  for (Rule rule : {Rule::kLinear, Rule::kEuler, Rule::kExact, Rule::kExactLog}) {
    KernelCase c = {.name = "decay", .tokens = 70, .rule = rule, .decay = true};
    KernelInputs in = make_inputs(c, DType::kFloat32);
    // The second chunk starts with the strongest; the third is mild.
    in.problem.log_decay[3] = rounded(-1e17, DType::kFloat32);
    in.problem.log_decay[9] = -std::numeric_limits<float>::max();
    in.problem.log_decay[20] = -std::numeric_limits<double>::infinity();
    in.problem.log_decay[32] = -std::numeric_limits<float>::max();
    in.problem.log_decay[33] = -std::numeric_limits<float>::max();
    const ReferenceResult forward = reference_forward(in.problem);
    const ReferenceGradients gradients =
        reference_backward(in.problem, in.grad_o, in.grad_final_state);
    SCOPED_TRACE(rule_name(rule));
    on_every_target([&] {
      KernelRun run(in, DType::kFloat32);
      run.forward(Form::kRecurrent, serial(1));
      expect_forward(run, forward, 3e-6);
      run.forward(Form::kChunk, serial(1));
      expect_forward(run, forward, 3e-6);
      run.backward(serial(1));
      expect_backward(run, gradients, 1e-5);
    });
    in.problem.log_decay[40] = std::numeric_limits<double>::quiet_NaN();
    KernelRun run(in, DType::kFloat32);
    run.forward(Form::kChunk, serial(1));
    const std::vector<double> o = run.o.get();
    for (size_t i = 0; i < o.size(); ++i)
      ASSERT_EQ(std::isnan(o[i]), i >= static_cast<size_t>(40 * c.value_dim)) << i;
  }
}

// Rows [first, last) of [1, T, 1, D] as bits: NaN equals itself.
std::vector<uint64_t> rows(const Tensor& x, int64_t dim, int64_t first, int64_t last) {
  std::vector<uint64_t> bits;
  const std::vector<double> values = x.get();
  for (int64_t i = first * dim; i < last * dim; ++i)
    bits.push_back(std::bit_cast<uint64_t>(values[i]));
  return bits;
}

TEST(Chunk, TokensDoNotSeeWhatComesAfterThem) {
  const KernelCase c = {.name = "causal", .tokens = 70, .decay = true};
  const int64_t n = c.key_dim;
  ASSERT_EQ(n, c.value_dim);
  const KernelInputs in = make_inputs(c, DType::kFloat32);
  on_every_target([&] {
    for (Form form : {Form::kChunk, Form::kRecurrent}) {
      KernelRun clean(in, DType::kFloat32);
      clean.forward(form, serial(1));
      clean.backward(serial(1));
      for (int64_t t : {0, 1, 6, 13, 31, 32, 45, 65, 69}) {
        for (double poison :
             {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
          for (auto input : {&ReferenceProblem::q, &ReferenceProblem::k, &ReferenceProblem::v,
                             &ReferenceProblem::beta, &ReferenceProblem::log_decay}) {
            KernelInputs spoiled = in;
            std::vector<double>& x = spoiled.problem.*input;
            x[static_cast<size_t>(t) * x.size() / 70] = poison;
            KernelRun run(spoiled, DType::kFloat32);
            run.forward(form, serial(1));
            ASSERT_EQ(rows(run.o, n, 0, t), rows(clean.o, n, 0, t)) << "o before " << t;
          }
          // Gradients travel the other way.
          KernelInputs spoiled = in;
          spoiled.grad_o[t * n] = poison;
          KernelRun run(spoiled, DType::kFloat32);
          run.forward(form, serial(1));
          run.backward(serial(1));
          ASSERT_EQ(rows(run.grad_q, n, t + 1, 70), rows(clean.grad_q, n, t + 1, 70)) << t;
          ASSERT_EQ(rows(run.grad_k, n, t + 1, 70), rows(clean.grad_k, n, t + 1, 70)) << t;
          ASSERT_EQ(rows(run.grad_v, n, t + 1, 70), rows(clean.grad_v, n, t + 1, 70)) << t;
          ASSERT_EQ(rows(run.grad_beta, 1, t + 1, 70), rows(clean.grad_beta, 1, t + 1, 70)) << t;
          ASSERT_EQ(rows(run.grad_log_decay, 1, t + 1, 70),
                    rows(clean.grad_log_decay, 1, t + 1, 70))
              << t;
        }
      }
    }
  });
}

TEST(Chunk, OffsetsBeyondTwoToThe31Elements) {
  const KernelCase c = {.name = "far", .tokens = 18, .key_dim = 8, .value_dim = 8};
  const KernelInputs in = make_inputs(c, DType::kFloat32);
  KernelRun run(in, DType::kFloat32);
  run.forward(Form::kChunk, serial(1));
  const std::vector<double> near_o = run.o.get();
  run.backward(serial(1));
  // Only the pages of the 18 rows are ever touched: 128 floats each.
  const int64_t token = int64_t{1} << 27;
  const size_t bytes = static_cast<size_t>(18 * token) * sizeof(float);
  void* far = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(far, MAP_FAILED);
  float* base = static_cast<float*>(far);
  // Field f of every row, 8 floats wide.
  const auto field = [&](int f) { return View{base + 8 * f, 0, token, 0}; };
  const auto result = [&](int f) { return MutableView{base + 8 * f, 0, token, 0}; };
  const auto put = [&](int f, const std::vector<double>& x) {
    for (int64_t t = 0; t < 18; ++t)
      for (int64_t i = 0; i < 8; ++i)
        base[t * token + 8 * f + i] = static_cast<float>(x[t * 8 + i]);
    return field(f);
  };
  const auto get = [&](int f) {
    std::vector<double> x;
    for (int64_t t = 0; t < 18; ++t)
      for (int64_t i = 0; i < 8; ++i) x.push_back(base[t * token + 8 * f + i]);
    return x;
  };
  run.problem.q = put(0, in.problem.q);
  run.problem.k = put(1, in.problem.k);
  run.problem.v = put(2, in.problem.v);
  for (Form form : {Form::kChunk, Form::kRecurrent}) {
    ForwardParams params;
    params.problem = run.problem;
    params.o = result(3);
    (form == Form::kChunk ? cpu::chunk_forward : cpu::recurrent_forward)(params, serial(1));
    EXPECT_LE(relative_error(get(3), near_o), form == Form::kChunk ? 0 : 1e-6);
  }
  BackwardParams params;
  params.problem = run.problem;
  params.grad_o = put(4, in.grad_o);
  params.grad_final_state = std::as_const(run.grad_final_state).view().data;
  params.checkpoints = std::as_const(run.checkpoints).view().data;
  params.grad_q = result(5);
  params.grad_k = result(6);
  params.grad_v = result(7);
  cpu::chunk_backward(params, serial(1));
  EXPECT_EQ(get(5), run.grad_q.get());
  EXPECT_EQ(get(6), run.grad_k.get());
  EXPECT_EQ(get(7), run.grad_v.get());
  munmap(far, bytes);
}

TEST(Chunk, NothingToDo) {
  for (const KernelCase& c :
       {KernelCase{.name = "no_tokens", .tokens = 0}, KernelCase{.name = "no_batch", .batch = 0}}) {
    const KernelInputs in = make_inputs(c, DType::kFloat32);
    KernelRun run(in, DType::kFloat32);
    for (Form form : {Form::kChunk, Form::kRecurrent}) {
      run.forward(form, serial(2));
      EXPECT_EQ(run.final_state.get(), in.problem.initial_state);
    }
    run.backward(serial(2));
    EXPECT_EQ(run.grad_initial_state.get(), in.grad_final_state);
  }
}

}  // namespace
}  // namespace efla::testing
