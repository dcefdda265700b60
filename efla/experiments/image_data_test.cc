#include "efla/experiments/image_data.h"

#include <numeric>

#include "efla/experiments/test_images.h"

namespace efla {
namespace {

using testing::error_of;
using testing::idx_bytes;
using testing::spit;
using testing::TempFolder;
using testing::write_images;

TEST(ImageData, ReadsTheFourFiles) {
  const TempFolder folder;
  write_images(folder.path(), 5, 3);
  const ImageData data = read_image_data(folder.path());
  EXPECT_EQ(data.train.count(), 5);
  EXPECT_EQ(data.test.count(), 3);
  EXPECT_EQ(data.train.length(), 16);
  EXPECT_EQ(data.train.pixels.size(), 5u * 16);
  EXPECT_NE(data.train.fingerprint, data.test.fingerprint);
}

TEST(ImageData, TheFingerprintKnowsLabelsToo) {
  const TempFolder folder;
  write_images(folder.path(), 2, 2);
  spit(folder / "train-labels-idx1-ubyte", idx_bytes({2}, {0, 1}));
  const std::string before = read_image_data(folder.path()).train.fingerprint;
  spit(folder / "train-labels-idx1-ubyte", idx_bytes({2}, {1, 1}));
  EXPECT_NE(read_image_data(folder.path()).train.fingerprint, before);
}

// Each file that is wrong is named, with what is wrong.
TEST(ImageData, SaysWhichFileIsWrong) {
  const TempFolder folder;
  const auto error_with = [&](const std::string& name, const std::string& content) {
    write_images(folder.path(), 5, 3);
    spit(folder / name, content);
    const std::string message = error_of([&] { read_image_data(folder.path()); });
    EXPECT_MENTIONS(message, (folder / name).string());
    return message;
  };
  EXPECT_MENTIONS(error_with("train-labels-idx1-ubyte", idx_bytes({4}, {0, 1, 0, 1})),
                  "4 labels do not match the 5 images");
  EXPECT_MENTIONS(error_with("t10k-labels-idx1-ubyte", idx_bytes({3}, {0, 10, 1})),
                  "label 1 is 10, not one of 0 to 9");
  EXPECT_MENTIONS(error_with("t10k-labels-idx1-ubyte", idx_bytes({3, 1}, {0, 1, 1})),
                  "has 2 dimensions where labels have 1");
  EXPECT_MENTIONS(error_with("train-images-idx3-ubyte", idx_bytes({2}, {0, 1})),
                  "has 1 dimensions where images have 3");
  EXPECT_MENTIONS(
      error_with("train-images-idx3-ubyte", idx_bytes({5, 2, 1}, std::vector<uint8_t>(10))),
      "2 x 1 pixels are not square");
  EXPECT_MENTIONS(error_with("t10k-images-idx3-ubyte", idx_bytes({3, 2, 2}, {1, 2, 3, 4})),
                  "truncated, it holds 4 of the 12 elements");
}

TEST(ImageData, SaysWhatIsMissingOrDoesNotBelongTogether) {
  const TempFolder folder;
  write_images(folder.path(), 5, 3);
  testing::write_image_set(folder.path(), "t10k", 3, 2, 1);
  EXPECT_MENTIONS(error_of([&] { read_image_data(folder.path()); }),
                  "training images have 4 x 4 pixels and test images 2 x 2");
  std::filesystem::remove(folder / "t10k-images-idx3-ubyte");
  const std::string message = error_of([&] { read_image_data(folder.path()); });
  EXPECT_MENTIONS(message, "holds neither t10k-images-idx3-ubyte nor t10k-images-idx3-ubyte.gz");
  EXPECT_MENTIONS(error_of([&] { read_image_data(folder / "none"); }), "dataset-fashion-mnist");
}

TEST(ImageData, ShrinksByTheMeanOverBlocks) {
  const ImageSet images{4, {0, 2, 9, 9, 4, 6, 9, 9, 1, 1, 0, 0, 1, 2, 0, 255}, {3}};
  const ImageSet small = shrink(images, 2);
  EXPECT_EQ(small.side, 2);
  EXPECT_EQ(small.pixels, (std::vector<uint8_t>{3, 9, 1, 64}));  // 1.25 -> 1, 63.75 -> 64
  EXPECT_EQ(small.labels, images.labels);
  EXPECT_MENTIONS(error_of([&] { shrink(images, 3); }), "4 x 4 pixels cannot be shrunk 3 times");
}

TEST(ImageData, PermutesEveryImageTheSameWay) {
  ImageSet images{4, std::vector<uint8_t>(32), {0, 1}};
  std::iota(images.pixels.begin(), images.pixels.begin() + 16, 0);
  std::iota(images.pixels.begin() + 16, images.pixels.end(), 100);
  const ImageSet permuted = permute_pixels(images, 92);
  EXPECT_NE(permuted.pixels, images.pixels);
  for (size_t i = 0; i < 16; ++i) EXPECT_EQ(permuted.pixels[16 + i], permuted.pixels[i] + 100);
  std::vector<uint8_t> sorted(permuted.pixels.begin(), permuted.pixels.begin() + 16);
  std::sort(sorted.begin(), sorted.end());
  EXPECT_TRUE(std::equal(sorted.begin(), sorted.end(), images.pixels.begin()));
  EXPECT_NE(permute_pixels(images, 93).pixels, permuted.pixels);
}

TEST(ImageData, TakesTheFirstImages) {
  const ImageSet images{1, {7, 8, 9}, {1, 2, 3}};
  EXPECT_EQ(first_images(images, 2).pixels, (std::vector<uint8_t>{7, 8}));
  EXPECT_EQ(first_images(images, 2).labels, (std::vector<uint8_t>{1, 2}));
  EXPECT_EQ(first_images(images, 0).count(), 3);
  EXPECT_EQ(first_images(images, 9).count(), 3);
}

}  // namespace
}  // namespace efla
