#include "efla/io/idx.h"

#include <zlib.h>

#include "efla/io/test_util.h"

namespace efla {
namespace {

using testing::error_of;
using testing::slurp;
using testing::spit;
using testing::TempFolder;

// Two images of 2 x 3 pixels.
std::string images() {
  std::string file("\0\0\x08\x03\0\0\0\x02\0\0\0\x02\0\0\0\x03", 16);
  for (char pixel = 0; pixel < 12; ++pixel) file += static_cast<char>(20 * pixel);
  return file;
}

std::filesystem::path written(const TempFolder& folder, const std::string& content) {
  spit(folder / "file", content);
  return folder / "file";
}

std::filesystem::path compressed(const TempFolder& folder, const std::string& content) {
  const std::filesystem::path path = folder / "file.gz";
  const gzFile file = ::gzopen(path.c_str(), "wb");
  ::gzwrite(file, content.data(), static_cast<unsigned>(content.size()));
  ::gzclose(file);
  return path;
}

void expect_the_images(const IdxArray& array) {
  EXPECT_EQ(array.sizes, (std::vector<int64_t>{2, 2, 3}));
  EXPECT_EQ(array.values,
            (std::vector<uint8_t>{0, 20, 40, 60, 80, 100, 120, 140, 160, 180, 200, 220}));
}

TEST(Idx, ReadsPlainAndCompressedFiles) {
  const TempFolder folder;
  expect_the_images(read_idx(written(folder, images())));
  expect_the_images(read_idx(compressed(folder, images())));
}

TEST(Idx, ReadsBigEndianSizesAndMoreThanOnePiece) {
  const TempFolder folder;
  std::string file("\0\0\x08\x01\0\x12\x03\x04", 8);
  file.resize(8 + 0x120304, '\7');  // over a mebibyte
  const IdxArray array = read_idx(written(folder, file));
  EXPECT_EQ(array.sizes, std::vector<int64_t>{0x120304});
  EXPECT_EQ(array.values.size(), size_t{0x120304});
  EXPECT_EQ(array.values.back(), 7);
}

TEST(Idx, SaysWhatIsWrong) {
  const TempFolder folder;
  const auto error = [&](const std::string& content) {
    const std::string message = error_of([&] { read_idx(written(folder, content)); });
    EXPECT_MENTIONS(message, (folder / "file").string());
    return message;
  };
  EXPECT_MENTIONS(error(images().substr(0, 20)), "it holds 4 of the 12 elements");
  EXPECT_MENTIONS(error(images() + "x"), "bytes follow the 12 elements");
  EXPECT_MENTIONS(error(images().substr(0, 10)), "ends inside the IDX header");
  EXPECT_MENTIONS(error("ab"), "ends inside the IDX header");
  EXPECT_MENTIONS(error(""), "ends inside the IDX header");
  EXPECT_MENTIONS(error("<html>not found"), "no IDX file, it begins with 3c 68 74 6d");
  EXPECT_MENTIONS(error(std::string("\0\0\x0d\x01\0\0\0\x01", 8)), "IDX type 0x0d");
  EXPECT_MENTIONS(error(std::string("\0\0\x08\x01\0\0\0\0", 8)), "dimension 0 of its header is 0");
  EXPECT_MENTIONS(error(std::string("\0\0\x08\x02\xff\xff\xff\xff\xff\xff\xff\xff", 12)), "2^30");
  EXPECT_MENTIONS(error_of([&] { read_idx(folder / "none"); }), "does not exist");
  EXPECT_MENTIONS(error_of([&] { read_idx(folder.path()); }), "is a folder");
}

TEST(Idx, SaysWhenCompressedDataAreTruncatedOrDamaged) {
  const TempFolder folder;
  const std::filesystem::path path = compressed(folder, images());
  const std::string whole = slurp(path);
  spit(path, whole.substr(0, whole.size() - 12));
  EXPECT_MENTIONS(error_of([&] { read_idx(path); }), "truncated");
  std::string damaged = whole;
  damaged[damaged.size() - 6] ^= 1;  // of the checksum
  spit(path, damaged);
  EXPECT_MENTIONS(error_of([&] { read_idx(path); }), "damaged");
}

}  // namespace
}  // namespace efla
