// The in-place step against the double reference: every rule, storage type and instruction set.
#include <sys/mman.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "efla/flow/reference.h"
#include "efla/kernels/cpu/delta_rule.h"
#include "efla/kernels/cpu/kernel_test.h"

namespace efla::cpu {
namespace {

struct StepCase {
  int64_t batch = 2, tokens = 1, heads = 2, value_heads = 2, key_dim = 16, value_dim = 16;
  DType dtype = DType::kFloat32;
  Rule rule = Rule::kExact;
  bool decay = false, l2norm = false;
  std::optional<DType> state_dtype = {};

  DType stored() const { return state_dtype.value_or(arithmetic_dtype(dtype)); }
};

// Inputs with gaps between tokens and heads, and a pool of one state more than rows.
class StepData {
 public:
  explicit StepData(const StepCase& c)
      : c_(c),
        q(Array::random(c.dtype, c.batch * c.tokens * key_token(), 1)),
        k(Array::random(c.dtype, c.batch * c.tokens * key_token(), 2)),
        v(Array::random(c.dtype, c.batch * c.tokens * value_token(), 3)),
        beta(arithmetic_dtype(c.dtype), c.batch * c.tokens * c.value_heads),
        log_decay(arithmetic_dtype(c.dtype), beta.size()),
        pool(Array::random(c.stored(), (c.batch + 1) * state_size(), 4)),
        o(c.dtype, v.size()) {
    // Keys of norm about one keep the Euler and truncated rules from growing.
    for (int64_t i = 0; i < k.size(); ++i) k.set(i, k.get(i) / std::sqrt(double(c.key_dim)));
    for (int64_t i = 0; i < beta.size(); ++i) {
      beta.set(i, 0.1 + 0.8 * double(i % 7) / 7);
      log_decay.set(i, -0.3 * double(i % 5) / 5);
    }
  }

  int64_t key_head() const { return c_.key_dim + 3; }
  int64_t key_token() const { return c_.heads * key_head() + 5; }
  int64_t value_head() const { return c_.value_dim + 1; }
  int64_t value_token() const { return c_.value_heads * value_head() + 2; }
  int64_t state_size() const { return c_.value_heads * c_.key_dim * c_.value_dim; }

  StepParams params(const std::vector<int64_t>* indices) {
    StepParams p;
    Problem& pr = p.problem;
    pr.shape = {c_.batch, c_.tokens, c_.heads, c_.value_heads, c_.key_dim, c_.value_dim, c_.batch};
    pr.dtype = c_.dtype;
    pr.rule = c_.rule;
    pr.scale = 0.7;
    pr.qk_l2norm = c_.l2norm;
    pr.q = {q.data(), c_.tokens * key_token(), key_token(), key_head()};
    pr.k = {k.data(), c_.tokens * key_token(), key_token(), key_head()};
    pr.v = {v.data(), c_.tokens * value_token(), value_token(), value_head()};
    pr.beta = {beta.data(), c_.tokens * c_.value_heads, c_.value_heads, 1};
    if (c_.decay) pr.log_decay = {log_decay.data(), c_.tokens * c_.value_heads, c_.value_heads, 1};
    p.o = {o.data(), c_.tokens * value_token(), value_token(), value_head()};
    p.state = pool.data();
    p.state_dtype = c_.state_dtype;
    p.pool_size = c_.batch + 1;
    p.state_indices = indices ? indices->data() : nullptr;
    return p;
  }

  // Row b of a gapped array as [T, heads, dim].
  void append_row(const Array& a, int64_t b, int64_t token, int64_t head, int64_t heads,
                  int64_t dim, std::vector<double>& out) const {
    for (int64_t t = 0; t < c_.tokens; ++t)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < dim; ++i)
          out.push_back(a.get((b * c_.tokens + t) * token + h * head + i));
  }

  // The reference for row b that starts from pool state `slot`.
  ReferenceResult reference(int64_t b, int64_t slot, const Array& pool_before) const {
    ReferenceProblem r;
    r.tokens = c_.tokens;
    r.heads = c_.heads;
    r.value_heads = c_.value_heads;
    r.key_dim = c_.key_dim;
    r.value_dim = c_.value_dim;
    r.rule = c_.rule;
    r.scale = 0.7;
    r.qk_l2norm = c_.l2norm;
    append_row(q, b, key_token(), key_head(), c_.heads, c_.key_dim, r.q);
    append_row(k, b, key_token(), key_head(), c_.heads, c_.key_dim, r.k);
    append_row(v, b, value_token(), value_head(), c_.value_heads, c_.value_dim, r.v);
    append_row(beta, b, c_.value_heads, 1, c_.value_heads, 1, r.beta);
    if (c_.decay) append_row(log_decay, b, c_.value_heads, 1, c_.value_heads, 1, r.log_decay);
    for (int64_t i = 0; i < state_size(); ++i)
      r.initial_state.push_back(pool_before.get(slot * state_size() + i));
    return reference_forward(r);
  }

  std::vector<double> output_row(int64_t b) const {
    std::vector<double> out;
    append_row(o, b, value_token(), value_head(), c_.value_heads, c_.value_dim, out);
    return out;
  }
  std::vector<double> state(int64_t slot) const {
    const std::vector<double> all = pool.values();
    return {all.begin() + slot * state_size(), all.begin() + (slot + 1) * state_size()};
  }

  StepCase c_;
  Array q, k, v, beta, log_decay, pool, o;
};

void expect_matches_reference(const StepCase& c) {
  SCOPED_TRACE(testing::Message() << dtype_name(c.dtype) << " rule " << int(c.rule) << " K "
                                  << c.key_dim << " V " << c.value_dim << " T " << c.tokens);
  for_each_target([&] {
    StepData data(c);
    const Array before = data.pool;
    step(data.params(nullptr), threaded_executor(3));
    for (int64_t b = 0; b < c.batch; ++b) {
      const ReferenceResult expected = data.reference(b, b, before);
      expect_close(data.output_row(b), expected.o, tolerance(c.dtype), "o");
      // The state is stored in the arithmetic type whatever q is.
      expect_close(data.state(b), expected.final_state, tolerance(arithmetic_dtype(c.dtype)),
                   "state");
    }
  });
}

// A bfloat16 state is the exact one rounded once: off by 2^-8 of each element at most, beside what
// float arithmetic does to the largest.
void expect_one_rounding(const std::vector<double>& actual, const std::vector<double>& exact) {
  ASSERT_EQ(actual.size(), exact.size());
  double largest = 0;
  for (double x : exact) largest = std::max(largest, std::abs(x));
  int64_t rounded = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double error = std::abs(actual[i] - exact[i]);
    ASSERT_FALSE(!(error <= std::abs(exact[i]) / 256 + 1e-5 * largest))
        << "state[" << i << "] is " << actual[i] << ", exact " << exact[i];
    rounded += error > 1e-5 * largest;
  }
  EXPECT_GT(rounded, 0) << "it was stored in bfloat16";
}

TEST(Step, StateInBFloat16IsRoundedOnceACall) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
    for (const int64_t value_dim : {5, 16, 64, 65, 200})
      for (const int64_t tokens : {1, 2, 8}) {
        StepCase c;
        c.dtype = dtype;
        c.state_dtype = DType::kBFloat16;
        c.batch = 3;
        c.tokens = tokens;
        c.value_heads = 4;
        c.key_dim = 33;
        c.value_dim = value_dim;
        c.decay = tokens > 1;
        SCOPED_TRACE(testing::Message()
                     << dtype_name(dtype) << " V " << value_dim << " T " << tokens);
        const std::vector<int64_t> indices = {3, -1, 0};
        for_each_target([&] {
          StepData data(c), untouched(c);
          step(data.params(&indices), threaded_executor(3));
          for (const int64_t b : {0, 2}) {
            const ReferenceResult exact = data.reference(b, indices[b], untouched.pool);
            expect_close(data.output_row(b), exact.o, tolerance(dtype), "o");
            expect_one_rounding(data.state(indices[b]), exact.final_state);
          }
          for (double x : data.output_row(1)) EXPECT_EQ(x, 0.0);
          for (const int64_t slot : {1, 2}) EXPECT_EQ(data.state(slot), untouched.state(slot));
          StepData alone(c);
          step(alone.params(&indices), {});
          EXPECT_TRUE(alone.pool.same_bits(data.pool));
        });
      }
}

TEST(Step, MatchesReferenceForEveryRuleAndStorageType) {
  for (const DType dtype : kStorageTypes)
    for (const Rule rule : kAllRules)
      for (const bool decay : {false, true}) {
        if (decay && (rule == Rule::kRk2 || rule == Rule::kRk4)) continue;
        StepCase c;
        c.dtype = dtype;
        c.rule = rule;
        c.decay = decay;
        c.tokens = 3;
        expect_matches_reference(c);
      }
}

TEST(Step, AnyHeadSize) {
  for (const auto& [key_dim, value_dim] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {3, 5}, {17, 63}, {64, 65}, {128, 128}, {33, 200}, {512, 512}})
    for (const DType dtype : kStorageTypes) {
      StepCase c;
      c.batch = 1;
      c.dtype = dtype;
      c.key_dim = key_dim;
      c.value_dim = value_dim;
      expect_matches_reference(c);
    }
}

TEST(Step, OneToEightTokensWithNormalisedKeys) {
  for (int64_t tokens = 1; tokens <= 8; ++tokens) {
    StepCase c;
    c.tokens = tokens;
    c.l2norm = true;
    c.decay = true;
    c.value_dim = 70;
    expect_matches_reference(c);
  }
}

TEST(Step, ValueHeadsShareKeyHeads) {
  StepCase c;
  c.heads = 2;
  c.value_heads = 6;
  expect_matches_reference(c);
}

TEST(Step, KeysOfAnyNormStayFinite) {
  for (const double norm : {0.0, 1e-20, 1.0, 1e3}) {
    StepCase c;
    for_each_target([&] {
      StepData data(c);
      for (int64_t i = 0; i < data.k.size(); ++i) data.k.set(i, data.k.get(i) * norm);
      const Array before = data.pool;
      step(data.params(nullptr), {});
      for (int64_t b = 0; b < c.batch; ++b) {
        const ReferenceResult expected = data.reference(b, b, before);
        expect_close(data.output_row(b), expected.o, 1e-4, "o");
        expect_close(data.state(b), expected.final_state, 1e-4, "state");
      }
    });
  }
}

TEST(Step, PaddingRowsGiveZeroAndTouchNoState) {
  StepCase c;
  c.batch = 3;
  c.tokens = 2;
  const std::vector<int64_t> indices = {3, -1, 0};
  for_each_target([&] {
    StepData data(c);
    const Array before = data.pool;
    step(data.params(&indices), threaded_executor(2));
    for (double x : data.output_row(1)) EXPECT_EQ(x, 0.0);
    for (const int64_t b : {0, 2}) {
      const ReferenceResult expected = data.reference(b, indices[b], before);
      expect_close(data.output_row(b), expected.o, 1e-5, "o");
      expect_close(data.state(indices[b]), expected.final_state, 1e-5, "state");
    }
    StepData untouched(c);
    for (const int64_t slot : {1, 2}) EXPECT_EQ(data.state(slot), untouched.state(slot));
  });
}

TEST(Step, WritesOnlyItsOwnElementsOfStridedOutput) {
  StepCase c;
  StepData data(c);
  step(data.params(nullptr), {});
  int64_t untouched = 0;
  for (double x : data.o.values()) untouched += std::isnan(x);
  EXPECT_EQ(data.o.size() - untouched, c.batch * c.tokens * c.value_heads * c.value_dim);
}

TEST(Step, SameBitsForAnyThreadsAndNeighbours) {
  StepCase c;
  c.batch = 5;
  c.key_dim = 128;
  c.value_dim = 200;
  for_each_target([&] {
    StepData one(c), many(c);
    step(one.params(nullptr), {});
    step(many.params(nullptr), threaded_executor(7));
    EXPECT_TRUE(one.o.same_bits(many.o));
    EXPECT_TRUE(one.pool.same_bits(many.pool));
    StepCase alone = c;
    alone.batch = 1;
    StepData first(alone);  // the same seeds: row 0 of the others
    step(first.params(nullptr), {});
    EXPECT_EQ(first.output_row(0), one.output_row(0));
  });
}

TEST(Step, TokensTogetherEqualTokensOneByOne) {
  StepCase c;
  c.batch = 1;
  c.tokens = 6;
  c.decay = true;
  StepData together(c), apart(c);
  step(together.params(nullptr), {});
  for (int64_t t = 0; t < c.tokens; ++t) {
    StepParams p = apart.params(nullptr);
    const auto advance = [&](auto& view) {  // float32: four bytes an element
      view.data = reinterpret_cast<decltype(view.data)>(reinterpret_cast<intptr_t>(view.data) +
                                                        t * view.token * 4);
    };
    p.problem.shape.tokens = 1;
    advance(p.problem.q);
    advance(p.problem.k);
    advance(p.problem.v);
    advance(p.problem.beta);
    advance(p.problem.log_decay);
    advance(p.o);
    step(p, {});
  }
  expect_close(apart.output_row(0), together.output_row(0), 1e-6, "o");
  expect_close(apart.state(0), together.state(0), 1e-6, "state");
}

TEST(Step, KeysWhoseSquareOverflows) {
  for (const bool l2norm : {false, true})
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      StepCase c;
      c.batch = 1;
      c.tokens = 5;
      c.decay = true;
      c.dtype = dtype;
      c.l2norm = l2norm;
      for_each_target([&] {
        StepData data(c);
        // Tokens 1 and 2: two such keys in a row, the second of the largest numbers.
        for (int64_t i = data.key_token(); i < 3 * data.key_token(); ++i)
          data.k.set(i, i < 2 * data.key_token() ? 1e20 * data.k.get(i)
                                                 : std::copysign(3.38e38, data.k.get(i)));
        const Array before = data.pool;
        const ReferenceResult expected = data.reference(0, 0, before);
        step(data.params(nullptr), {});
        expect_close(data.output_row(0), expected.o, tolerance(dtype), "o");
        expect_close(data.state(0), expected.final_state, 1e-5, "state");
      });
    }
}

TEST(Step, SlotsBeyondTwoToThe31Elements) {
  StepCase c;
  c.batch = c.heads = c.value_heads = 1;
  c.key_dim = c.value_dim = 512;
  StepData data(c);
  const int64_t slot = (int64_t{1} << 13) + 3;
  const int64_t elements = (slot + 1) * data.state_size();
  ASSERT_GT(slot * data.state_size(), int64_t{1} << 31);
  // Only the pages of one state are ever touched.
  const size_t bytes = static_cast<size_t>(elements) * sizeof(float);
  void* far = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(far, MAP_FAILED);
  float* state = static_cast<float*>(far) + slot * data.state_size();
  for (int64_t i = 0; i < data.state_size(); ++i) state[i] = static_cast<float>(data.pool.get(i));
  StepParams p = data.params(nullptr);
  step(p, {});
  const std::vector<double> near_o = data.output_row(0), near_state = data.state(0);
  const std::vector<int64_t> indices = {slot};
  p.state = far;
  p.pool_size = slot + 1;
  p.state_indices = indices.data();
  step(p, {});
  EXPECT_EQ(data.output_row(0), near_o);
  EXPECT_EQ(std::vector<double>(state, state + data.state_size()), near_state);
  munmap(far, bytes);
}

TEST(Step, NothingToDo) {
  StepCase c;
  c.batch = 0;
  StepData data(c);
  step(data.params(nullptr), {});
  EXPECT_EQ(data.o.size(), 0);
}

}  // namespace
}  // namespace efla::cpu
