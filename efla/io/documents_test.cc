#include "efla/io/documents.h"

#include <lzma.h>
#include <zlib.h>

#include "efla/io/test_util.h"

namespace efla {
namespace {

using testing::error_of;
using testing::slurp;
using testing::spit;
using testing::TempFolder;

std::vector<std::string> texts_of(const std::vector<std::string>& paths, DocumentFormat format,
                                  std::vector<std::string>* origins = nullptr) {
  std::vector<std::string> texts;
  for_each_document(paths, format, true, [&](const Document& document) {
    texts.push_back(document.text);
    if (origins != nullptr) origins->push_back(document.origin);
  });
  return texts;
}

void write_gzip(const std::string& path, const std::string& text, const char* mode = "wb") {
  const gzFile file = gzopen(path.c_str(), mode);
  ASSERT_EQ(gzwrite(file, text.data(), static_cast<unsigned>(text.size())),
            static_cast<int>(text.size()));
  ASSERT_EQ(gzclose(file), Z_OK);
}

void write_xz(const std::string& path, const std::string& text) {
  std::string out(lzma_stream_buffer_bound(text.size()), '\0');
  size_t size = 0;
  ASSERT_EQ(lzma_easy_buffer_encode(1, LZMA_CHECK_CRC64, nullptr,
                                    reinterpret_cast<const uint8_t*>(text.data()), text.size(),
                                    reinterpret_cast<uint8_t*>(out.data()), &size, out.size()),
            LZMA_OK);
  spit(path, out.substr(0, size));
}

TEST(Documents, OneFileIsOneDocument) {
  const TempFolder folder;
  spit(folder / "a", "first\ntext");
  spit(folder / "b", "second");
  std::vector<std::string> origins;
  EXPECT_EQ(texts_of({folder / "b", folder / "a"}, DocumentFormat::kFile, &origins),
            (std::vector<std::string>{"second", "first\ntext"}));
  EXPECT_EQ(origins, (std::vector<std::string>{folder / "b", folder / "a"}));
}

TEST(Documents, FormFeedLinesSeparate) {
  const TempFolder folder;
  spit(folder / "a", "\f\none\nmore\n\f\n\f\r\ntwo \f inside\n\f");
  std::vector<std::string> origins;
  EXPECT_EQ(texts_of({folder / "a"}, DocumentFormat::kFormFeed, &origins),
            (std::vector<std::string>{"one\nmore\n", "two \f inside\n"}));
  EXPECT_EQ(origins, (std::vector<std::string>{(folder / "a").string() + ":2",
                                               (folder / "a").string() + ":6"}));
}

TEST(Documents, JsonLines) {
  const TempFolder folder;
  spit(folder / "a",
       "{\"text\": \"one\\nline \\u00e9\", \"id\": 3}\n\n{\"text\": \"\"}\r\n{\"text\":\"two\"}");
  EXPECT_EQ(texts_of({folder / "a"}, DocumentFormat::kJsonLines),
            (std::vector<std::string>{"one\nline \xC3\xA9", "two"}));
}

TEST(Documents, CompressedFiles) {
  const TempFolder folder;
  const std::string text = testing::made_up_text(700'000, 5);
  write_gzip(folder / "a.gz", text);
  write_xz(folder / "a.xz", text);
  EXPECT_EQ(read_text_file(folder / "a.gz"), text);
  EXPECT_EQ(read_text_file(folder / "a.xz"), text);
  write_gzip(folder / "a.gz", "tail", "ab");  // a second gzip member
  EXPECT_EQ(read_text_file(folder / "a.gz"), text + "tail");
}

TEST(Documents, DamagedCompressedFiles) {
  const TempFolder folder;
  write_gzip(folder / "whole.gz", testing::made_up_text(100'000, 5));
  write_xz(folder / "whole.xz", testing::made_up_text(100'000, 5));
  for (const std::string kind : {".gz", ".xz"}) {
    const std::string whole = slurp(folder / ("whole" + kind));
    std::string flipped = whole;
    flipped[whole.size() / 2] = static_cast<char>(flipped[whole.size() / 2] ^ 4);
    for (const std::string& bad :
         {whole.substr(0, whole.size() / 2), whole.substr(0, 3), flipped, std::string("text")}) {
      spit(folder / ("bad" + kind), bad);
      EXPECT_MENTIONS(error_of([&] { read_text_file(folder / ("bad" + kind)); }), "bad" + kind);
    }
  }
}

TEST(Documents, SaysWhatIsWrong) {
  const TempFolder folder;
  spit(folder / "empty", "");
  write_gzip(folder / "empty.gz", "");
  spit(folder / "bad", "one\ntw\xFFo");
  const auto read = [&](const std::string& name, DocumentFormat format) {
    return error_of([&] { texts_of({folder / name}, format); });
  };
  EXPECT_MENTIONS(read("none", DocumentFormat::kFile), "No such file");
  EXPECT_MENTIONS(read(".", DocumentFormat::kFile), "not a regular file");
  for (const auto format :
       {DocumentFormat::kFile, DocumentFormat::kFormFeed, DocumentFormat::kJsonLines}) {
    EXPECT_MENTIONS(read("empty", format), "is empty");
    EXPECT_MENTIONS(read("empty.gz", format), "is empty");
    EXPECT_MENTIONS(read("bad", format), "line 2, byte offset 6");
  }
  for_each_document({folder / "bad"}, DocumentFormat::kFile, false,
                    [](const Document& document) { EXPECT_EQ(document.text, "one\ntw\xFFo"); });
  for (const char* line :
       {"{\"text\": 3}", "{\"other\": \"x\"}", "[1]", "{\"text\": \"x\"", "nonsense"}) {
    spit(folder / "json", "{\"text\":\"fine\"}\n" + std::string(line));
    EXPECT_MENTIONS(read("json", DocumentFormat::kJsonLines), (folder / "json").string() + ":2");
  }
  EXPECT_EQ(parse_document_format("jsonl"), DocumentFormat::kJsonLines);
  EXPECT_THROW(parse_document_format("xml"), UsageError);
}

}  // namespace
}  // namespace efla
