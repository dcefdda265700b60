#include "efla/io/documents.h"

#include <lzma.h>
#include <zlib.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string_view>

#include "efla/io/error.h"
#include "efla/io/mapped_file.h"
#include "efla/io/utf8.h"

namespace efla {
namespace {

bool ends_with(const std::string& text, std::string_view suffix) {
  return text.size() >= suffix.size() &&
         text.compare(text.size() - suffix.size(), suffix.size(), suffix) == 0;
}

[[noreturn]] void throw_damaged(const std::string& path, const char* kind) {
  throw Error("cannot decompress " + path + ": it is not a whole " + kind +
              " file (damaged or cut short); fetch it again");
}

std::string inflate_gzip(std::span<const std::byte> input, const std::string& path) {
  std::string text;
  std::vector<Bytef> buffer(1 << 18);
  z_stream stream{};
  if (inflateInit2(&stream, 15 + 16) != Z_OK) throw Error("cannot start zlib for " + path);
  const std::unique_ptr<z_stream, int (*)(z_stream*)> guard(&stream, inflateEnd);
  auto* next = reinterpret_cast<const Bytef*>(input.data());
  size_t left = input.size();
  int result = Z_OK;
  // A .gz file may hold several members one after another; each ends with Z_STREAM_END.
  while (left > 0 || (result == Z_OK && stream.avail_out == 0)) {
    if (result == Z_STREAM_END && inflateReset(&stream) != Z_OK) throw_damaged(path, "gzip");
    stream.next_in = const_cast<Bytef*>(next);
    stream.avail_in = static_cast<uInt>(std::min<size_t>(left, 1u << 30));
    stream.next_out = buffer.data();
    stream.avail_out = static_cast<uInt>(buffer.size());
    const uInt given = stream.avail_in;
    result = inflate(&stream, Z_NO_FLUSH);
    if (result != Z_OK && result != Z_STREAM_END) throw_damaged(path, "gzip");
    next += given - stream.avail_in;
    left -= given - stream.avail_in;
    text.append(reinterpret_cast<char*>(buffer.data()), buffer.size() - stream.avail_out);
  }
  if (result != Z_STREAM_END) throw_damaged(path, "gzip");
  return text;
}

std::string decode_xz(std::span<const std::byte> input, const std::string& path) {
  std::string text;
  std::vector<uint8_t> buffer(1 << 18);
  lzma_stream stream = LZMA_STREAM_INIT;
  if (lzma_stream_decoder(&stream, UINT64_MAX, LZMA_CONCATENATED) != LZMA_OK) {
    throw Error("cannot start liblzma for " + path);
  }
  const std::unique_ptr<lzma_stream, void (*)(lzma_stream*)> guard(&stream, lzma_end);
  stream.next_in = reinterpret_cast<const uint8_t*>(input.data());
  stream.avail_in = input.size();
  lzma_ret result = LZMA_OK;
  while (result == LZMA_OK) {
    stream.next_out = buffer.data();
    stream.avail_out = buffer.size();
    result = lzma_code(&stream, LZMA_FINISH);
    text.append(reinterpret_cast<char*>(buffer.data()), buffer.size() - stream.avail_out);
  }
  if (result != LZMA_STREAM_END) throw_damaged(path, "xz");
  return text;
}

// A file's text: the mapping itself, or what it decompresses to.
class TextSource {
 public:
  explicit TextSource(const std::string& path) : file_(MappedFile::open(path)) {
    const std::span<const std::byte> bytes = file_->bytes();
    if (ends_with(path, ".gz"))
      decompressed_ = inflate_gzip(bytes, path);
    else if (ends_with(path, ".xz"))
      decompressed_ = decode_xz(bytes, path);
    else
      view_ = {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
    if (view_.empty()) view_ = decompressed_;
    if (view_.empty()) throw Error(path + " is empty: give a file that holds text");
  }
  TextSource(const TextSource&) = delete;
  TextSource& operator=(const TextSource&) = delete;
  std::string_view view() const { return view_; }

 private:
  std::shared_ptr<MappedFile> file_;
  std::string decompressed_;
  std::string_view view_;
};

// Calls use(line, number) for each line, without its newline.
template <typename Use>
void for_each_line(std::string_view text, const Use& use) {
  int64_t number = 1;
  for (size_t begin = 0; begin < text.size(); ++number) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    use(text.substr(begin, end - begin), number);
    begin = end + 1;
  }
}

std::string json_document(std::string_view line, const std::string& origin) {
  const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (object.is_discarded()) {
    throw Error(origin + " is not valid JSON: every line must be one object with a \"text\"");
  }
  if (!object.is_object() || !object.contains("text") || !object["text"].is_string()) {
    throw Error(origin + " has no string \"text\": every line must be one object with a \"text\"");
  }
  return object["text"].get<std::string>();
}

void read_json_lines(std::string_view text, const std::string& path,
                     const std::function<void(const Document&)>& use) {
  for_each_line(text, [&](std::string_view line, int64_t number) {
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) return;
    const std::string origin = path + ":" + std::to_string(number);
    const Document document{json_document(line, origin), origin};
    if (!document.text.empty()) use(document);
  });
}

void read_form_feed(std::string_view text, const std::string& path,
                    const std::function<void(const Document&)>& use) {
  int64_t first_line = 1;
  size_t begin = 0;
  const auto emit = [&](size_t end) {
    if (end > begin) {
      use({std::string(text.substr(begin, end - begin)), path + ":" + std::to_string(first_line)});
    }
  };
  for_each_line(text, [&](std::string_view line, int64_t number) {
    if (line != "\f" && line != "\f\r") return;
    emit(static_cast<size_t>(line.data() - text.data()));
    begin = std::min(static_cast<size_t>(line.data() - text.data()) + line.size() + 1, text.size());
    first_line = number + 1;
  });
  emit(text.size());
}

}  // namespace

DocumentFormat parse_document_format(const std::string& name) {
  if (name == "file") return DocumentFormat::kFile;
  if (name == "formfeed") return DocumentFormat::kFormFeed;
  if (name == "jsonl") return DocumentFormat::kJsonLines;
  throw UsageError("document format \"" + name + "\" is unknown: use file, formfeed or jsonl");
}

void for_each_document(const std::vector<std::string>& paths, DocumentFormat format,
                       bool require_utf8, const std::function<void(const Document&)>& use) {
  for (const std::string& path : paths) {
    const TextSource source(path);
    if (require_utf8) validate_utf8(source.view(), path);
    if (format == DocumentFormat::kJsonLines) {
      read_json_lines(source.view(), path, use);
    } else if (format == DocumentFormat::kFormFeed) {
      read_form_feed(source.view(), path, use);
    } else {
      use({std::string(source.view()), path});
    }
  }
}

std::string read_text_file(const std::string& path) { return std::string(TextSource(path).view()); }

}  // namespace efla
