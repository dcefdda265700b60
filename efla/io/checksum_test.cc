#include "efla/io/checksum.h"

#include "efla/io/atomic_file.h"
#include "efla/io/error.h"
#include "efla/io/test_util.h"

namespace efla {
namespace {

TEST(Checksum, KnownValues) {
  // The check value of CRC-32/ISO-HDLC and the test vectors of FNV's authors.
  EXPECT_EQ(crc32_of("123456789", 9), 0xCBF43926u);
  EXPECT_EQ(crc32_of("6789", 4, crc32_of("12345", 5)), 0xCBF43926u);
  EXPECT_EQ(fnv1a_hex(""), "cbf29ce484222325");
  EXPECT_EQ(fnv1a_hex("foobar"), "85944171f73967e8");
}

TEST(Checksum, FileInPiecesEqualsItsBytes) {
  const testing::TempFolder folder;
  const std::string text(200'001, 'x');
  write_file_atomically(folder / "file", text);
  EXPECT_EQ(checksum_file(folder / "file"),
            (FileChecksum{text.size(), crc32_of(text.data(), text.size())}));
  EXPECT_THROW(checksum_file(folder / "none"), Error);
  EXPECT_THROW(checksum_file(folder.path()), Error);
}

}  // namespace
}  // namespace efla
