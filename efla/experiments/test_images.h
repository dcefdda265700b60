// Image files for the tests of this room.
#pragma once

#include <string>
#include <vector>

#include "efla/io/random.h"
#include "efla/io/test_util.h"

namespace efla::testing {

inline std::string big_endian(uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16),
          static_cast<char>(value >> 8), static_cast<char>(value)};
}

inline std::string idx_bytes(const std::vector<uint32_t>& sizes, const std::vector<uint8_t>& data) {
  std::string bytes("\0\0\x08", 3);
  bytes += static_cast<char>(sizes.size());
  for (const uint32_t size : sizes) bytes += big_endian(size);
  return bytes.append(data.begin(), data.end());
}

/// One IDX pair of `count` noisy images of side x side pixels; the label, 0 or 1, says which half,
/// upper or lower, is bright.
inline void write_image_set(const std::filesystem::path& folder, const std::string& prefix,
                            uint32_t count, uint32_t side, uint64_t seed) {
  SplitMix64 random(seed);
  std::vector<uint8_t> pixels, labels;
  for (uint32_t i = 0; i < count; ++i) {
    labels.push_back(static_cast<uint8_t>(random.below(2)));
    for (uint32_t p = 0; p < side * side; ++p) {
      const bool bright = (p >= side * side / 2) == (labels.back() == 1);
      pixels.push_back(static_cast<uint8_t>(random.below(60) + (bright ? 180 : 0)));
    }
  }
  spit(folder / (prefix + "-images-idx3-ubyte"), idx_bytes({count, side, side}, pixels));
  spit(folder / (prefix + "-labels-idx1-ubyte"), idx_bytes({count}, labels));
}

inline void write_images(const std::filesystem::path& folder, uint32_t train, uint32_t test,
                         uint32_t side = 4) {
  write_image_set(folder, "train", train, side, 1);
  write_image_set(folder, "t10k", test, side, 2);
}

}  // namespace efla::testing
