// SwiGLU against double arithmetic; its gradient against central differences.
#include "efla/kernels/cpu/kernel_test.h"
#include "efla/kernels/cpu/layer_ops.h"

namespace efla::cpu {
namespace {

double swiglu(double gate, double up) { return gate / (1 + std::exp(-gate)) * up; }

TEST(Swiglu, ForwardAndBackwardForEveryStorageType) {
  for (const DType dtype : kStorageTypes)
    for (const int64_t count : {0, 1, 15, 64, 1000, 50001}) {
      SCOPED_TRACE(testing::Message() << dtype_name(dtype) << " " << count);
      for_each_target([&] {
        const Array gate = Array::random(dtype, count, 1, 3.0);
        const Array up = Array::random(dtype, count, 2);
        const Array grad_y = Array::random(dtype, count, 3);
        Array y(dtype, count), grad_gate(dtype, count), grad_up(dtype, count);
        SwigluParams p{count, dtype, gate.data(), up.data(), y.data()};
        swiglu_forward(p, threaded_executor(3));
        swiglu_backward({p, grad_y.data(), grad_gate.data(), grad_up.data()}, threaded_executor(3));
        std::vector<double> expected(count), expected_gate(count), expected_up(count);
        for (int64_t i = 0; i < count; ++i) {
          const double g = gate.get(i), u = up.get(i), h = 1e-5;
          expected[i] = swiglu(g, u);
          expected_gate[i] = grad_y.get(i) * (swiglu(g + h, u) - swiglu(g - h, u)) / (2 * h);
          expected_up[i] = grad_y.get(i) * swiglu(g, 1);
        }
        expect_close(y.values(), expected, tolerance(dtype), "y");
        expect_close(grad_gate.values(), expected_gate, std::max(1e-9, tolerance(dtype)),
                     "grad_gate");
        expect_close(grad_up.values(), expected_up, tolerance(dtype), "grad_up");
      });
    }
}

TEST(Swiglu, RelativeErrorStaysSmallOverTheWholeRange) {
  const int64_t count = 20001;
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    Array gate(dtype, count), up(dtype, count), y(dtype, count);
    for (int64_t i = 0; i < count; ++i) {
      gate.set(i, -80.0 + 160.0 * double(i) / double(count - 1));
      up.set(i, 1.0);
    }
    for_each_target([&] {
      swiglu_forward({count, dtype, gate.data(), up.data(), y.data()}, {});
      for (int64_t i = 0; i < count; ++i) {
        const double expected = swiglu(gate.get(i), 1);
        ASSERT_NEAR(y.get(i), expected,
                    std::abs(expected) * (dtype == DType::kFloat32 ? 1e-6 : 1e-14))
            << "at " << gate.get(i);
      }
    });
  }
}

TEST(Swiglu, ExtremesAndNan) {
  const double huge = 1e30, nan = std::numeric_limits<double>::quiet_NaN();
  for (const DType dtype : kStorageTypes)
    for_each_target([&] {
      Array gate(dtype, 5), up(dtype, 5), y(dtype, 5), dg(dtype, 5), du(dtype, 5);
      for (int i = 0; i < 5; ++i) up.set(i, 1.0);
      gate.set(0, huge);
      gate.set(1, -1000.0);
      gate.set(2, nan);
      gate.set(3, -1e38);
      gate.set(4, dtype == DType::kFloat64 ? -1e308 : -3e38);
      const SwigluParams p{5, dtype, gate.data(), up.data(), y.data()};
      swiglu_forward(p, {});
      swiglu_backward({p, up.data(), dg.data(), du.data()}, {});
      EXPECT_EQ(y.get(0), gate.get(0));
      EXPECT_NEAR(y.get(1), 0.0, 1e-30);
      EXPECT_TRUE(std::isnan(y.get(2)));
      EXPECT_NEAR(dg.get(0), 1.0, 1e-6);
      EXPECT_NEAR(dg.get(1), 0.0, 1e-30);
      EXPECT_TRUE(std::isnan(dg.get(2)));
      for (int i : {3, 4}) {
        EXPECT_EQ(y.get(i), 0.0) << gate.get(i);
        EXPECT_EQ(dg.get(i), 0.0) << gate.get(i);
        EXPECT_EQ(du.get(i), 0.0) << gate.get(i);
      }
    });
}

TEST(Swiglu, UnwantedGradientsAreLeftOut) {
  const Array x = Array::random(DType::kFloat32, 100, 1);
  Array out(DType::kFloat32, 100);
  const SwigluParams p{100, DType::kFloat32, x.data(), x.data(), nullptr};
  swiglu_backward({p, x.data(), nullptr, out.data()}, {});
  for (double g : out.values()) EXPECT_FALSE(std::isnan(g));
}

}  // namespace
}  // namespace efla::cpu
