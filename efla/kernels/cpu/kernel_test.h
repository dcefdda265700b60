// What the kernels' tests share: typed arrays read and written as doubles, every instruction set in
// turn, and an executor with real threads.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "efla/kernels/cpu/storage.h"
#include "efla/kernels/cpu/targets.h"
#include "efla/kernels/params.h"
#include "hwy/targets.h"

namespace efla::cpu {

/// Runs f once for every instruction set that the kernels are compiled for and the machine has.
template <typename F>
void for_each_target(const F& f) {
  const int64_t targets = (hwy::SupportedTargets() & HWY_TARGETS) | HWY_STATIC_TARGET;
  for (int64_t rest = targets; rest != 0; rest &= rest - 1) {
    const int64_t target = rest & -rest;
    hwy::GetChosenTarget().Update(target);
    SCOPED_TRACE(std::string("instruction set ") + hwy::TargetName(target));
    f();
  }
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

/// Each body on a thread of its own, so that a race has a chance to show.
inline Executor threaded_executor(int threads) {
  Executor executor;
  executor.threads = threads;
  executor.parallel_for = [](int64_t count, const std::function<void(int64_t)>& body) {
    std::vector<std::thread> pool;
    for (int64_t i = 0; i < count; ++i) pool.emplace_back([&body, i] { body(i); });
    for (std::thread& t : pool) t.join();
  };
  return executor;
}

/// A flat array of a storage type. Fresh ones hold NaN, so that an element nobody writes shows.
class Array {
 public:
  Array(DType dtype, int64_t size) : dtype_(dtype), size_(size), bytes_(size * element_size()) {
    for (int64_t i = 0; i < size; ++i) set(i, std::numeric_limits<double>::quiet_NaN());
  }
  /// Normal values, rounded to the storage type.
  static Array random(DType dtype, int64_t size, unsigned seed, double scale = 1.0) {
    Array out(dtype, size);
    std::mt19937 generator(seed);
    std::normal_distribution<double> normal(0.0, scale);
    for (int64_t i = 0; i < size; ++i) out.set(i, normal(generator));
    return out;
  }

  int64_t size() const { return size_; }
  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  double get(int64_t i) const {
    double value = 0;
    dispatch_storage(dtype_, [&](auto tag) {
      value = to_arithmetic(reinterpret_cast<const decltype(tag)*>(bytes_.data())[i]);
    });
    return value;
  }
  void set(int64_t i, double value) {
    dispatch_storage(dtype_, [&](auto tag) {
      using S = decltype(tag);
      reinterpret_cast<S*>(bytes_.data())[i] =
          from_arithmetic<S>(static_cast<Arithmetic<S>>(value));
    });
  }
  std::vector<double> values() const {
    std::vector<double> out(size_);
    for (int64_t i = 0; i < size_; ++i) out[i] = get(i);
    return out;
  }
  bool same_bits(const Array& other) const { return bytes_ == other.bytes_; }

 private:
  int64_t element_size() const {
    return dtype_ == DType::kFloat64 ? 8 : dtype_ == DType::kFloat32 ? 4 : 2;
  }

  DType dtype_;
  int64_t size_;
  std::vector<std::byte> bytes_;
};

inline DType arithmetic_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

/// Error allowed where the value comes out of a few hundred operations of order one.
inline double tolerance(DType dtype) {
  return dtype == DType::kFloat64 ? 1e-12 : dtype == DType::kFloat32 ? 1e-5 : 1e-2;
}

/// |actual - expected| <= tolerance * (largest expected magnitude), element by element.
inline void expect_close(const std::vector<double>& actual, const std::vector<double>& expected,
                         double tolerance, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  double largest = 1e-3;
  for (double x : expected) largest = std::max(largest, std::abs(x));
  for (size_t i = 0; i < actual.size(); ++i)
    // Negated, so that NaN fails.
    ASSERT_FALSE(!(std::abs(actual[i] - expected[i]) <= tolerance * largest))
        << what << "[" << i << "] is " << actual[i] << ", expected " << expected[i];
}

inline const char* dtype_name(DType dtype) {
  return dtype == DType::kFloat64 ? "float64" : dtype == DType::kFloat32 ? "float32" : "bfloat16";
}

inline constexpr DType kStorageTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat64};

}  // namespace efla::cpu
