// RMS norm with and without weight and gate, against double arithmetic and central differences.
#include <optional>

#include "efla/kernels/cpu/kernel_test.h"
#include "efla/kernels/cpu/layer_ops.h"

namespace efla::cpu {
namespace {

constexpr double kEps = 1e-5;

double silu(double x) { return x / (1 + std::exp(-x)); }

// One row in double; weight and gate may be empty.
std::vector<double> reference_row(const std::vector<double>& x, const std::vector<double>& weight,
                                  const std::vector<double>& gate) {
  double sum = 0;
  for (double v : x) sum += v * v;
  std::vector<double> y(x.size());
  for (size_t i = 0; i < x.size(); ++i)
    y[i] = x[i] / std::sqrt(sum / double(x.size()) + kEps) * (weight.empty() ? 1 : weight[i]) *
           (gate.empty() ? 1 : silu(gate[i]));
  return y;
}

struct NormCase {
  DType dtype;
  int64_t rows, dim;
  bool weight, gate;
};

class NormData {
 public:
  explicit NormData(const NormCase& c)
      : c_(c),
        x(Array::random(c.dtype, c.rows * c.dim, 1)),
        weight(Array::random(c.dtype, c.dim, 2)),
        gate(Array::random(c.dtype, c.rows * c.dim, 3)),
        grad_y(Array::random(c.dtype, c.rows * c.dim, 4)),
        y(c.dtype, c.rows * c.dim),
        grad_x(c.dtype, c.rows * c.dim),
        grad_gate(c.dtype, c.rows * c.dim),
        grad_weight(arithmetic_dtype(c.dtype), c.dim) {}

  RmsNormParams forward_params() {
    RmsNormParams p;
    p.rows = c_.rows;
    p.dim = c_.dim;
    p.dtype = c_.dtype;
    p.eps = kEps;
    p.x = x.data();
    p.weight = c_.weight ? weight.data() : nullptr;
    p.gate = c_.gate ? gate.data() : nullptr;
    p.y = y.data();
    return p;
  }
  void run(const Executor& executor) {
    rms_norm_forward(forward_params(), executor);
    RmsNormBackwardParams b;
    b.forward = forward_params();
    b.grad_y = grad_y.data();
    b.grad_x = grad_x.data();
    b.grad_weight = grad_weight.data();
    b.grad_gate = c_.gate ? grad_gate.data() : nullptr;
    rms_norm_backward(b, executor);
  }
  std::vector<double> row(const Array& a, int64_t r) const {
    std::vector<double> out(c_.dim);
    for (int64_t i = 0; i < c_.dim; ++i) out[i] = a.get(r * c_.dim + i);
    return out;
  }

  NormCase c_;
  Array x, weight, gate, grad_y, y, grad_x, grad_gate, grad_weight;
};

double loss(const NormData& d, int64_t r, const std::vector<double>& x,
            const std::vector<double>& weight, const std::vector<double>& gate) {
  const std::vector<double> y = reference_row(x, weight, gate);
  double sum = 0;
  for (size_t i = 0; i < y.size(); ++i) sum += y[i] * d.grad_y.get(r * d.c_.dim + i);
  return sum;
}

void expect_matches_reference(const NormCase& c) {
  SCOPED_TRACE(testing::Message() << dtype_name(c.dtype) << " " << c.rows << "x" << c.dim
                                  << " weight " << c.weight << " gate " << c.gate);
  NormData d(c);
  d.run(threaded_executor(3));
  const double h = 1e-5, tol = std::max(1e-8, 2 * tolerance(c.dtype));
  const std::vector<double> weight = c.weight ? d.weight.values() : std::vector<double>{};
  std::vector<double> y, grad_x, grad_gate, grad_weight(c.dim, 0.0);
  for (int64_t r = 0; r < c.rows; ++r) {
    std::vector<double> x = d.row(d.x, r), w(c.dim, 1.0);
    if (c.weight) w = weight;
    std::vector<double> gate = c.gate ? d.row(d.gate, r) : std::vector<double>{};
    for (double v : reference_row(x, weight, gate)) y.push_back(v);
    const auto difference = [&](std::vector<double>& values, int64_t i) {
      const double kept = values[i];
      values[i] = kept + h;
      const double up = loss(d, r, x, w, gate);
      values[i] = kept - h;
      const double down = loss(d, r, x, w, gate);
      values[i] = kept;
      return (up - down) / (2 * h);
    };
    for (int64_t i = 0; i < c.dim; ++i) {
      grad_x.push_back(difference(x, i));
      if (c.gate) grad_gate.push_back(difference(gate, i));
      grad_weight[i] += difference(w, i);
    }
  }
  expect_close(d.y.values(), y, tolerance(c.dtype), "y");
  expect_close(d.grad_x.values(), grad_x, tol, "grad_x");
  if (c.gate) expect_close(d.grad_gate.values(), grad_gate, tol, "grad_gate");
  expect_close(d.grad_weight.values(), grad_weight,
               std::max(1e-8, tolerance(arithmetic_dtype(c.dtype))), "grad_weight");
}

TEST(RmsNorm, MatchesReferenceOnEveryInstructionSet) {
  for_each_target([] {
    for (const DType dtype : kStorageTypes)
      for (const bool weight : {false, true})
        for (const bool gate : {false, true}) {
          expect_matches_reference({dtype, 3, 37, weight, gate});
          expect_matches_reference({dtype, 150, 16, weight, gate});
        }
  });
}

TEST(RmsNorm, OddSizes) {
  for_each_target([] {
    for (const int64_t dim : {1, 2, 15, 17, 130})
      for (const int64_t rows : {1, 5})
        expect_matches_reference({DType::kFloat32, rows, dim, true, true});
  });
}

TEST(RmsNorm, SameBitsForAnyThreads) {
  const NormCase c{DType::kFloat32, 3000, 128, true, true};
  NormData one(c), many(c);
  one.run({});
  many.run(threaded_executor(5));
  EXPECT_TRUE(one.y.same_bits(many.y));
  EXPECT_TRUE(one.grad_x.same_bits(many.grad_x));
  EXPECT_TRUE(one.grad_gate.same_bits(many.grad_gate));
  EXPECT_TRUE(one.grad_weight.same_bits(many.grad_weight));
}

TEST(RmsNorm, NoRowsGiveZeroWeightGradient) {
  NormData d({DType::kFloat32, 0, 8, true, false});
  d.run({});
  EXPECT_EQ(d.grad_weight.values(), std::vector<double>(8, 0.0));
}

TEST(RmsNorm, ZeroRowIsFinite) {
  for_each_target([] {
    NormData d({DType::kFloat32, 1, 20, true, true});
    for (int64_t i = 0; i < 20; ++i) d.x.set(i, 0.0);
    d.run({});
    for (double v : d.y.values()) EXPECT_EQ(v, 0.0);
    for (double v : d.grad_x.values()) EXPECT_TRUE(std::isfinite(v));
  });
}

}  // namespace
}  // namespace efla::cpu
