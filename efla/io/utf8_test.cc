#include "efla/io/utf8.h"

#include "efla/io/test_util.h"

namespace efla {
namespace {

using testing::error_of;

TEST(Utf8, EveryCodePointAndNothingElse) {
  // Encodes each code point by the definition and expects it back; surrogates are refused.
  for (uint32_t c = 0; c <= 0x110010; ++c) {
    std::string text;
    if (c < 0x80) {
      text = {static_cast<char>(c)};
    } else if (c < 0x800) {
      text = {static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 63))};
    } else if (c < 0x10000) {
      text = {static_cast<char>(0xE0 | c >> 12), static_cast<char>(0x80 | (c >> 6 & 63)),
              static_cast<char>(0x80 | (c & 63))};
    } else {
      text = {static_cast<char>(0xF0 | c >> 18), static_cast<char>(0x80 | (c >> 12 & 63)),
              static_cast<char>(0x80 | (c >> 6 & 63)), static_cast<char>(0x80 | (c & 63))};
    }
    const Utf8Char decoded = decode_utf8(text);
    const bool valid = c <= 0x10FFFF && (c < 0xD800 || c > 0xDFFF);
    ASSERT_EQ(decoded.length, valid ? static_cast<int>(text.size()) : 0) << c;
    if (!valid) continue;
    ASSERT_EQ(decoded.code_point, c);
    for (size_t n = 1; n < text.size(); ++n) {
      ASSERT_TRUE(decode_utf8(text.substr(0, n)).incomplete) << c;
    }
  }
}

TEST(Utf8, RefusesOverlongForms) {
  for (const char* text : {"\xC0\x80", "\xC1\xBF", "\xE0\x80\x80", "\xE0\x9F\xBF",
                           "\xF0\x80\x80\x80", "\xF0\x8F\xBF\xBF", "\x80", "\xFF", "\xC3("}) {
    EXPECT_EQ(decode_utf8(text).length, 0);
    EXPECT_FALSE(decode_utf8(text).incomplete);
  }
}

TEST(Utf8, ErrorNamesLineAndOffset) {
  validate_utf8("caf\xC3\xA9\n", "x");
  const std::string message = error_of([] { validate_utf8("caf\xC3\xA9\nab\xFFz", "book.txt"); });
  EXPECT_MENTIONS(message, "book.txt");
  EXPECT_MENTIONS(message, "line 2");
  EXPECT_MENTIONS(message, "byte offset 8");
  EXPECT_MENTIONS(error_of([] { validate_utf8("ab\xC3", "cut.txt"); }), "byte offset 2");
}

TEST(CountWords, SplitsAsPythonDoes) {
  EXPECT_EQ(count_words(""), 0);
  EXPECT_EQ(count_words(" \n\t "), 0);
  EXPECT_EQ(count_words("one"), 1);
  EXPECT_EQ(count_words("  one two\n\nthree,four "), 3);
  EXPECT_EQ(count_words("a\xC2\xA0"
                        "b\xE3\x80\x80"
                        "c\xE2\x80\x8B"
                        "d"),
            3);  // U+200B is no space
}

}  // namespace
}  // namespace efla
