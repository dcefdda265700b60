#include "efla/io/idx.h"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "efla/io/atomic_file.h"
#include "efla/io/error.h"

namespace efla {
namespace {

constexpr uint8_t kUnsignedByte = 0x08;
constexpr int64_t kPiece = 1 << 20;  // bytes read at once, so that a wrong header asks for no more
constexpr int64_t kLargest = 1 << 30;  // elements; MNIST has 47 million

// A gzip or plain file (zlib tells them apart), read to the byte.
class Source {
 public:
  explicit Source(const std::filesystem::path& path)
      : path_(path), file_(::gzopen(path.c_str(), "rb")) {
    if (file_ == nullptr) fail(fmt::format("cannot be opened ({})", std::strerror(errno)));
  }
  ~Source() { ::gzclose(file_); }
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(fmt::format("{}: {}; get the file again", path_.string(), what));
  }

  // Bytes read: fewer than `count` only where the content ends.
  int64_t read(uint8_t* to, int64_t count) {
    const int got = ::gzread(file_, to, static_cast<unsigned>(count));
    int code = Z_OK;
    const char* message = ::gzerror(file_, &code);
    // Z_BUF_ERROR: the compressed data end early; the missing elements say so in our words.
    if (got < 0 && code != Z_BUF_ERROR) fail(fmt::format("damaged ({})", message));
    return std::max(got, 0);
  }

 private:
  std::filesystem::path path_;
  gzFile file_;
};

std::vector<int64_t> read_sizes(Source& source) {
  std::array<uint8_t, 4> magic{};
  if (source.read(magic.data(), 4) < 4) source.fail("truncated, it ends inside the IDX header");
  if (magic[0] != 0 || magic[1] != 0 || magic[3] == 0) {
    source.fail(fmt::format("no IDX file, it begins with {:02x} {:02x} {:02x} {:02x}", magic[0],
                            magic[1], magic[2], magic[3]));
  }
  if (magic[2] != kUnsignedByte) {
    source.fail(
        fmt::format("its elements have IDX type 0x{:02x}, not unsigned bytes (0x08)", magic[2]));
  }
  std::vector<int64_t> sizes;
  int64_t elements = 1;
  for (int i = 0; i < magic[3]; ++i) {
    std::array<uint8_t, 4> b{};
    if (source.read(b.data(), 4) < 4) source.fail("truncated, it ends inside the IDX header");
    sizes.push_back(int64_t{b[0]} << 24 | int64_t{b[1]} << 16 | int64_t{b[2]} << 8 | b[3]);
    if (sizes.back() == 0) source.fail(fmt::format("dimension {} of its header is 0", i));
    if (sizes.back() > kLargest / elements) source.fail("its header claims over 2^30 elements");
    elements *= sizes.back();
  }
  return sizes;
}

}  // namespace

IdxArray read_idx(const std::filesystem::path& path) {
  if (!path_exists(path))
    throw Error(path.string() + " does not exist; give the folder that has it");
  if (is_folder(path)) throw Error(path.string() + " is a folder where an IDX file should be");
  Source source(path);
  IdxArray array{read_sizes(source), {}};
  int64_t elements = 1;
  for (const int64_t size : array.sizes) elements *= size;
  for (int64_t done = 0; done < elements;) {
    const int64_t piece = std::min(kPiece, elements - done);
    array.values.resize(static_cast<size_t>(done + piece));
    const int64_t got = source.read(array.values.data() + done, piece);
    done += got;
    if (got < piece) {
      source.fail(fmt::format("truncated, it holds {} of the {} elements that its header claims",
                              done, elements));
    }
  }
  uint8_t extra = 0;  // reading on also makes zlib compare its checksum
  if (source.read(&extra, 1) != 0) {
    source.fail(fmt::format("bytes follow the {} elements that its header claims", elements));
  }
  return array;
}

}  // namespace efla
