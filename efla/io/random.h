// Random order that is the same on every machine and standard library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace efla {

/// SplitMix64 (Steele, Lea, Flood 2014): 64 well-mixed bits per call from a counter.
class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    state_ += 0x9E3779B97F4A7C15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  /// Uniform in [0, bound) for bound > 0, without bias: draws that would favour small values are
  /// repeated.
  uint64_t below(uint64_t bound) {
    const uint64_t limit = UINT64_MAX - UINT64_MAX % bound;
    uint64_t drawn;
    do {
      drawn = next();
    } while (drawn >= limit);
    return drawn % bound;
  }

 private:
  uint64_t state_;
};

/// Fisher-Yates (std::shuffle leaves its use of the generator to the library).
template <typename T>
void shuffle(std::vector<T>& items, SplitMix64& random) {
  for (size_t i = items.size(); i > 1; --i) {
    std::swap(items[i - 1], items[random.below(i)]);
  }
}

}  // namespace efla
