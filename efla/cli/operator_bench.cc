#include "efla/cli/operator_bench.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "efla/io/error.h"

namespace efla::cli {
namespace {

// What the reference can afford.
int64_t checked_tokens(const BenchInputs& in) { return std::min<int64_t>(in.q.size(1), 200); }
int64_t checked_heads(const BenchInputs& in) { return std::min<int64_t>(in.q.size(2), 2); }

}  // namespace

BenchInputs::BenchInputs(const BenchCase& c, at::ScalarType dtype, at::Device device) {
  torch::manual_seed(1);
  const auto random = [&](at::IntArrayRef sizes) {
    return torch::randn(sizes, at::TensorOptions().device(device));
  };
  const std::vector<int64_t> sizes = {c.batch, c.tokens, c.heads, c.dim};
  q = random(sizes).to(dtype);
  k = (random(sizes) / std::sqrt(double(c.dim))).to(dtype);
  v = random(sizes).to(dtype);
  beta = torch::sigmoid(random({c.batch, c.tokens, c.heads}));
}

std::string shape_text(const BenchCase& c) {
  return fmt::format("({},{},{},{})", c.batch, c.tokens, c.heads, c.dim);
}

bool is_wanted(const std::string& only, const std::string& name) {
  if (only.empty() || name == only) return true;
  return only.back() == '*' && name.starts_with(only.substr(0, only.size() - 1));
}

void check_only(const std::string& only, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    if (is_wanted(only, name)) return;
  }
  throw UsageError(fmt::format("--only {}: no such operation on this device; there are {}", only,
                               fmt::join(names, ", ")));
}

std::vector<double> values(const at::Tensor& t) {
  const at::Tensor flat = t.detach().to(at::kCPU).to(at::kDouble).contiguous().flatten();
  return {flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel()};
}

double relative_error(const std::vector<double>& actual, const std::vector<double>& expected) {
  double difference = 0, largest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double d = std::abs(actual[i] - expected[i]);
    if (!(d <= difference)) difference = d;  // a NaN stays
    largest = std::max(largest, std::abs(expected[i]));
  }
  return difference / largest;
}

void require(double error, double limit, const std::string& what) {
  if (error <= limit) return;
  throw Error(fmt::format("{}: differs from the reference by {:.2e}, more than {:.0e}", what, error,
                          limit));
}

at::Tensor slice(const at::Tensor& x, int64_t tokens, int64_t heads) {
  return x.narrow(0, x.size(0) - 1, 1).narrow(1, 0, tokens).narrow(2, 0, heads);
}

ReferenceProblem reference_problem(const BenchInputs& in, int64_t tokens, int64_t heads) {
  ReferenceProblem p;
  p.tokens = tokens;
  p.heads = p.value_heads = heads;
  p.key_dim = p.value_dim = in.q.size(3);
  p.scale = 1 / std::sqrt(double(p.key_dim));
  p.q = values(slice(in.q, tokens, heads));
  p.k = values(slice(in.k, tokens, heads));
  p.v = values(slice(in.v, tokens, heads));
  p.beta = values(slice(in.beta, tokens, heads));
  return p;
}

double forward_error(const BenchInputs& in, const at::Tensor& o) {
  const int64_t tokens = checked_tokens(in), heads = checked_heads(in);
  return relative_error(values(slice(o, tokens, heads)),
                        reference_forward(reference_problem(in, tokens, heads)).o);
}

at::Tensor gradient_in_slice(const BenchInputs& in) {
  at::Tensor grad = torch::zeros_like(in.v);
  at::Tensor part = slice(grad, checked_tokens(in), checked_heads(in));
  part.copy_(torch::randn(part.sizes()));
  return grad;
}

double backward_error(const BenchInputs& in, const at::Tensor& grad,
                      const std::vector<at::Tensor>& gradients) {
  const int64_t tokens = checked_tokens(in), heads = checked_heads(in);
  const ReferenceGradients expected =
      reference_backward(reference_problem(in, tokens, heads), values(slice(grad, tokens, heads)));
  const std::vector<double>* references[] = {&expected.q, &expected.k, &expected.v, &expected.beta};
  double error = 0;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const double e = relative_error(values(slice(gradients[i], tokens, heads)), *references[i]);
    if (!(e <= error)) error = e;
  }
  return error;
}

}  // namespace efla::cli
