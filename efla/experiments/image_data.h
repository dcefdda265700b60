// Image sets in MNIST's files, as sequences of pixels.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace efla {

/// Images as rows of pixels with a label each.
struct ImageSet {
  int64_t side = 0;              // images are side x side
  std::vector<uint8_t> pixels;   // [count, side * side], row-major
  std::vector<uint8_t> labels;   // [count], below kImageClasses
  std::string fingerprint = {};  // of pixels and labels as read

  int64_t count() const { return static_cast<int64_t>(labels.size()); }
  int64_t length() const { return side * side; }
};

struct ImageData {
  ImageSet train, test;
};

inline constexpr int64_t kImageClasses = 10;

/// The folder that Debian's package dataset-fashion-mnist fills.
inline constexpr const char* kFashionMnist = "/usr/share/datasets/fashion-mnist";

/// Reads train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
/// t10k-labels-idx1-ubyte, each plain or with .gz, from `folder`. Errors name the file and, where
/// one is to blame, the label: a missing or damaged file, images that are not square or of another
/// size than the training images, another number of labels than of images, a label over 9.
ImageData read_image_data(const std::filesystem::path& folder);

/// Each image made smaller by the mean over blocks of factor x factor pixels. Throws UsageError
/// where the side is no multiple of `factor`.
ImageSet shrink(const ImageSet& images, int64_t factor);

/// Each image's pixels in the order that `seed` draws, the same for every image.
ImageSet permute_pixels(const ImageSet& images, uint64_t seed);

/// The first `count` images (0: all).
ImageSet first_images(const ImageSet& images, int64_t count);

}  // namespace efla
