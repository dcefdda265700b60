// CPython's random.Random: Mersenne Twister 19937, seeded and drawn from as Python does, so that
// bootstrap errors and few-shot examples are those of lm-evaluation-harness.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace efla {

class PythonRandom {
 public:
  /// random.Random(seed) for an integer of up to 64 bits.
  explicit PythonRandom(uint64_t seed);

  /// random(): uniform in [0, 1) with 53 bits.
  double uniform();
  /// One draw of choices(population, k=...) from a population of `size`: its index.
  int64_t choice(int64_t size) {
    return static_cast<int64_t>(uniform() * static_cast<double>(size));
  }
  /// randrange(bound) for 0 < bound < 2^32.
  uint32_t below(uint32_t bound);
  /// sample(range(size), k): k different indices in drawing order, k <= size.
  std::vector<int64_t> sample(int64_t size, int64_t k);

 private:
  static constexpr size_t kSize = 624;
  uint32_t next();
  void refill();

  std::array<uint32_t, kSize> state_;
  size_t used_ = kSize;
};

}  // namespace efla
