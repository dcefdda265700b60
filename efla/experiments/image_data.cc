#include "efla/experiments/image_data.h"

#include <fmt/format.h>

#include <numeric>

#include "efla/io/atomic_file.h"
#include "efla/io/checksum.h"
#include "efla/io/error.h"
#include "efla/io/idx.h"
#include "efla/io/random.h"

namespace efla {
namespace {

namespace fs = std::filesystem;

// Plain or compressed, whichever is there.
fs::path find_file(const fs::path& folder, const std::string& name) {
  for (const std::string& candidate : {name, name + ".gz"}) {
    fs::path path = folder / candidate;
    if (path_exists(path)) return path;
  }
  throw Error(
      fmt::format("{} holds neither {} nor {}.gz; give a folder with MNIST's four IDX files with "
                  "--data",
                  folder.string(), name, name));
}

void check_labels(const fs::path& labels_path, const IdxArray& labels, const fs::path& images_path,
                  const IdxArray& images) {
  if (labels.sizes.size() != 1) {
    throw Error(fmt::format("{}: has {} dimensions where labels have 1; are files swapped?",
                            labels_path.string(), labels.sizes.size()));
  }
  if (labels.sizes[0] != images.sizes[0]) {
    throw Error(fmt::format("{}: {} labels do not match the {} images of {}; get both files again",
                            labels_path.string(), labels.sizes[0], images.sizes[0],
                            images_path.string()));
  }
  for (size_t i = 0; i < labels.values.size(); ++i) {
    if (labels.values[i] >= kImageClasses) {
      throw Error(fmt::format("{}: label {} is {}, not one of 0 to {}; get the file again",
                              labels_path.string(), i, labels.values[i], kImageClasses - 1));
    }
  }
}

ImageSet read_set(const fs::path& folder, const std::string& prefix) {
  const fs::path images_path = find_file(folder, prefix + "-images-idx3-ubyte");
  const fs::path labels_path = find_file(folder, prefix + "-labels-idx1-ubyte");
  IdxArray images = read_idx(images_path), labels = read_idx(labels_path);
  if (images.sizes.size() != 3) {
    throw Error(fmt::format("{}: has {} dimensions where images have 3; are files swapped?",
                            images_path.string(), images.sizes.size()));
  }
  if (images.sizes[1] != images.sizes[2]) {
    throw Error(fmt::format("{}: images of {} x {} pixels are not square; give square ones",
                            images_path.string(), images.sizes[1], images.sizes[2]));
  }
  check_labels(labels_path, labels, images_path, images);
  const uint32_t of_images = crc32_of(images.values.data(), images.values.size());
  const uint32_t of_both = crc32_of(labels.values.data(), labels.values.size(), of_images);
  return {images.sizes[1], std::move(images.values), std::move(labels.values),
          fmt::format("{:08x}", of_both)};
}

}  // namespace

ImageData read_image_data(const fs::path& folder) {
  if (!is_folder(folder)) {
    throw Error(
        fmt::format("{} is no folder; give one with MNIST's four IDX files with --data, or "
                    "install Debian's package dataset-fashion-mnist",
                    folder.string()));
  }
  ImageData data{read_set(folder, "train"), read_set(folder, "t10k")};
  if (data.train.side != data.test.side) {
    throw Error(fmt::format(
        "{}: training images have {} x {} pixels and test images {} x {}; get "
        "files that belong together",
        folder.string(), data.train.side, data.train.side, data.test.side, data.test.side));
  }
  return data;
}

ImageSet shrink(const ImageSet& images, int64_t factor) {
  if (factor < 1 || images.side % factor != 0) {
    throw UsageError(
        fmt::format("images of {} x {} pixels cannot be shrunk {} times; give a "
                    "divisor of {} with --shrink",
                    images.side, images.side, factor, images.side));
  }
  ImageSet small{images.side / factor, {}, images.labels, images.fingerprint};
  small.pixels.reserve(static_cast<size_t>(images.count() * small.length()));
  for (int64_t image = 0; image < images.count(); ++image) {
    const uint8_t* from = images.pixels.data() + image * images.length();
    for (int64_t row = 0; row < small.side; ++row) {
      for (int64_t column = 0; column < small.side; ++column) {
        int64_t sum = 0;
        for (int64_t i = 0; i < factor; ++i) {
          for (int64_t j = 0; j < factor; ++j) {
            sum += from[(row * factor + i) * images.side + column * factor + j];
          }
        }
        const int64_t area = factor * factor;
        small.pixels.push_back(static_cast<uint8_t>((sum + area / 2) / area));
      }
    }
  }
  return small;
}

ImageSet permute_pixels(const ImageSet& images, uint64_t seed) {
  std::vector<int64_t> order(static_cast<size_t>(images.length()));
  std::iota(order.begin(), order.end(), 0);
  SplitMix64 random(seed);
  shuffle(order, random);
  ImageSet permuted = images;
  for (int64_t image = 0; image < images.count(); ++image) {
    const int64_t start = image * images.length();
    for (int64_t i = 0; i < images.length(); ++i) {
      permuted.pixels[static_cast<size_t>(start + i)] =
          images.pixels[static_cast<size_t>(start + order[static_cast<size_t>(i)])];
    }
  }
  return permuted;
}

ImageSet first_images(const ImageSet& images, int64_t count) {
  if (count == 0 || count >= images.count()) return images;
  ImageSet first{images.side, {}, {}, images.fingerprint};
  first.pixels.assign(images.pixels.begin(), images.pixels.begin() + count * images.length());
  first.labels.assign(images.labels.begin(), images.labels.begin() + count);
  return first;
}

}  // namespace efla
