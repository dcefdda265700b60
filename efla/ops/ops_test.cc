// The C++ functions of ops.h against the sequential reference (efla/flow/reference.h), with their
// gradients, and what they refuse.
#include "efla/ops/ops.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "efla/flow/reference.h"

namespace efla::ops {
namespace {

using at::Tensor;

struct Case {
  std::string name;
  Rule rule;
  std::string rule_name;
  bool decay = false;
  bool packed = false;
  bool qk_l2norm = false;
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

const std::vector<Case> kCases = {
    {"linear", Rule::kLinear, "linear"},
    {"linear_decay", Rule::kLinear, "linear", true},
    {"euler_l2norm", Rule::kEuler, "euler", false, false, true},
    {"euler_decay_packed", Rule::kEuler, "euler", true, true, true},
    {"rk2", Rule::kRk2, "rk2"},
    {"rk4_packed", Rule::kRk4, "rk4", false, true},
    {"exact", Rule::kExact, "exact"},
    {"exact_packed", Rule::kExact, "exact", false, true},
    {"exact_decay", Rule::kExact, "exact", true},
    {"exact_log_decay_packed", Rule::kExactLog, "exact_log", true, true},
};

std::vector<double> to_vector(const Tensor& t) {
  const Tensor c = t.detach().to(at::kDouble).contiguous();
  return {c.const_data_ptr<double>(), c.const_data_ptr<double>() + c.numel()};
}

void expect_near(const Tensor& actual, const std::vector<double>& expected, double tolerance,
                 const char* what) {
  ASSERT_TRUE(actual.defined()) << what;
  const std::vector<double> values = to_vector(actual);
  ASSERT_EQ(values.size(), expected.size()) << what;
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_NEAR(values[i], expected[i], tolerance) << what << " element " << i;
  }
}

// Random inputs in float64 with H = 2, HV = 4, K = 5, V = 3, as tensors and as a reference problem.
struct Inputs {
  Tensor q, k, v, beta, state;
  Options options;
  ReferenceProblem reference;
};

Inputs make_inputs(const Case& c, int64_t tokens) {
  torch::manual_seed(7);
  const auto f64 = at::TensorOptions().dtype(at::kDouble);
  const int64_t batch = c.packed ? 1 : 2;
  const int64_t sequences = c.packed ? 3 : batch;
  Inputs in;
  in.q = at::randn({batch, tokens, 2, 5}, f64);
  in.k = at::randn({batch, tokens, 2, 5}, f64) * 0.5;
  in.v = at::randn({batch, tokens, 4, 3}, f64);
  in.beta = at::rand({batch, tokens, 4}, f64);
  in.state = at::randn({sequences, 4, 5, 3}, f64);
  in.options.rule = c.rule_name;
  in.options.scale = 0.7;
  in.options.qk_l2norm = c.qk_l2norm;
  in.options.output_final_state = true;
  if (c.decay) in.options.log_decay = at::rand({batch, tokens, 4}, f64) * -0.3;
  if (c.packed) in.options.cu_seqlens = torch::tensor({int64_t{1}, int64_t{4}, int64_t{4}, tokens});

  ReferenceProblem& r = in.reference;
  r.batch = batch;
  r.tokens = tokens;
  r.heads = 2;
  r.value_heads = 4;
  r.key_dim = 5;
  r.value_dim = 3;
  r.rule = c.rule;
  r.scale = 0.7;
  r.qk_l2norm = c.qk_l2norm;
  r.q = to_vector(in.q);
  r.k = to_vector(in.k);
  r.v = to_vector(in.v);
  r.beta = to_vector(in.beta);
  r.initial_state = to_vector(in.state);
  if (c.decay) r.log_decay = to_vector(*in.options.log_decay);
  if (c.packed) r.cu_seqlens = {1, 4, 4, tokens};
  return in;
}

class DeltaRule : public testing::TestWithParam<Case> {};

TEST_P(DeltaRule, ValuesAndGradientsMatchTheReference) {
  for (const bool sequential : {false, true}) {
    Inputs in = make_inputs(GetParam(), 83);
    std::vector<Tensor*> leaves = {&in.q, &in.k, &in.v, &in.beta, &in.state};
    if (in.options.log_decay) leaves.push_back(&*in.options.log_decay);
    for (Tensor* t : leaves) t->requires_grad_(true);
    in.options.initial_state = in.state;
    const auto [o, final_state] = sequential ? recurrent(in.q, in.k, in.v, in.beta, in.options)
                                             : chunk(in.q, in.k, in.v, in.beta, in.options);
    const ReferenceResult expected = reference_forward(in.reference);
    expect_near(o, expected.o, 1e-10, "o");
    expect_near(final_state, expected.final_state, 1e-10, "final_state");

    const Tensor grad_o = at::randn_like(o);
    const Tensor grad_final = at::randn_like(final_state);
    torch::autograd::backward({o, final_state}, {grad_o, grad_final});
    const ReferenceGradients g =
        reference_backward(in.reference, to_vector(grad_o), to_vector(grad_final));
    expect_near(in.q.grad(), g.q, 1e-9, "grad q");
    expect_near(in.k.grad(), g.k, 1e-9, "grad k");
    expect_near(in.v.grad(), g.v, 1e-9, "grad v");
    expect_near(in.beta.grad(), g.beta, 1e-9, "grad beta");
    expect_near(in.state.grad(), g.initial_state, 1e-9, "grad initial_state");
    if (in.options.log_decay) {
      expect_near(in.options.log_decay->grad(), g.log_decay, 1e-9, "grad log_decay");
    }
  }
}

TEST_P(DeltaRule, StepMatchesTheReference) {
  Case c = GetParam();
  c.packed = false;
  Inputs in = make_inputs(c, 6);
  const ReferenceResult expected = reference_forward(in.reference);
  Tensor state = in.state.clone();
  std::vector<Tensor> rows;
  for (int64_t t = 0; t < 6; ++t) {
    std::optional<Tensor> decay;
    if (c.decay) decay = in.options.log_decay->select(1, t);
    rows.push_back(step_(in.q.select(1, t), in.k.select(1, t), in.v.select(1, t),
                         in.beta.select(1, t), state, decay, c.rule_name, 0.7, {}, c.qk_l2norm));
  }
  expect_near(at::stack(rows, 1), expected.o, 1e-10, "o");
  expect_near(state, expected.final_state, 1e-10, "state");
}

INSTANTIATE_TEST_SUITE_P(Rules, DeltaRule, testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

TEST(Operators, DefaultsAreTheExactRuleWithoutStates) {
  const Tensor q = at::randn({1, 4, 2, 8});
  const Tensor beta = at::rand({1, 4, 2});
  const auto [o, final_state] = chunk(q, q, q, beta);
  EXPECT_FALSE(final_state.defined());
  Options options;
  options.rule = "exact";
  options.scale = 1.0 / std::sqrt(8.0);
  options.output_final_state = true;
  const auto [same, state] = chunk(q, q, q, beta, options);
  EXPECT_TRUE(at::equal(o, same));
  EXPECT_EQ(state.sizes(), at::IntArrayRef({1, 2, 8, 8}));
}

TEST(Operators, TheStateOfAPoolIsUpdatedInPlace) {
  const Tensor q = at::randn({2, 1, 4});
  Tensor pool = at::zeros({3, 1, 4, 4});
  const Tensor o =
      step_(q, q, q, at::ones({2, 1}), pool, {}, "exact", {}, torch::tensor({2, -1}), false);
  EXPECT_GT(pool[2].abs().sum().item<float>(), 0);
  EXPECT_EQ(pool.slice(0, 0, 2).abs().sum().item<float>(), 0);
  EXPECT_EQ(o[1].abs().sum().item<float>(), 0);
}

TEST(Operators, LayerOperatorsMatchAten) {
  const auto f64 = at::TensorOptions().dtype(at::kDouble);
  const Tensor x = at::randn({2, 9, 6}, f64).requires_grad_(true);
  const Tensor gate = at::randn({2, 9, 6}, f64).requires_grad_(true);
  const Tensor weight = at::randn({6, 4}, f64).requires_grad_(true);
  const auto [y, state] = short_conv(x, weight, true, {}, true);
  const Tensor padded = at::constant_pad_nd(x.transpose(1, 2), {3, 0});
  const Tensor conv = at::conv1d(padded, weight.unsqueeze(1), {}, 1, at::IntArrayRef{0}, 1, 6);
  const Tensor y_ref = at::silu(conv.transpose(1, 2));
  EXPECT_TRUE(at::allclose(y, y_ref));
  EXPECT_TRUE(at::equal(state, x.slice(1, 5).transpose(1, 2)));
  const Tensor norm_weight = at::randn({6}, f64);
  const Tensor z = swiglu(gate, rms_norm(y, norm_weight, 1e-5, gate));
  const Tensor norm_ref = y_ref * at::rsqrt(y_ref.square().mean(-1, true) + 1e-5) * norm_weight;
  const Tensor z_ref = at::silu(gate) * norm_ref * at::silu(gate);
  EXPECT_TRUE(at::allclose(z, z_ref));
  const auto ours = torch::autograd::grad({z.square().sum()}, {x, gate, weight});
  const auto theirs = torch::autograd::grad({z_ref.square().sum()}, {x, gate, weight});
  for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(at::allclose(ours[i], theirs[i])) << i;
}

template <typename F>
std::string message_of(F&& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(Operators, ErrorsNameTheArgumentAndItsShape) {
  const Tensor q = at::zeros({1, 4, 2, 8});
  const Tensor beta = at::zeros({1, 4, 2});
  EXPECT_EQ(message_of([&] {
              chunk(q, at::zeros({1, 4, 2, 7}), q, beta);
            }),
            "efla::chunk: k must have the shape of q, [1, 4, 2, 8], but has shape [1, 4, 2, 7]");
  EXPECT_NE(message_of([&] {
              recurrent(q, q, q, at::zeros({1, 4}));
            })
                .find("efla::recurrent: beta must have shape [B, T, HV] = [1, 4, 2], but has shape "
                      "[1, 4]"),
            std::string::npos);
  Options options;
  options.rule = "rk4";
  options.log_decay = beta;
  EXPECT_NE(message_of([&] { chunk(q, q, q, beta, options); }).find("no form with log_decay"),
            std::string::npos);
  Tensor state = at::zeros({1, 2, 8, 7});
  EXPECT_NE(message_of([&] { step_(q, q, q, beta, state); }).find("efla::step_: state must have"),
            std::string::npos);
}

}  // namespace
}  // namespace efla::ops
