#include "efla/io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "efla/io/error.h"

namespace efla {

std::shared_ptr<MappedFile> MappedFile::open(const std::filesystem::path& path) {
  const auto fail = [&](const std::string& reason) {
    throw Error("cannot read " + path.string() + ": " + reason);
  };
  // O_NONBLOCK: a FIFO is refused below instead of waited for.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) fail(std::strerror(errno));
  struct stat status;
  const int stat_error = ::fstat(descriptor, &status) == 0 ? 0 : errno;
  if (stat_error != 0 || !S_ISREG(status.st_mode)) {
    ::close(descriptor);
    fail(stat_error != 0 ? std::strerror(stat_error) : "it is not a regular file");
  }
  const size_t size = static_cast<size_t>(status.st_size);
  std::byte* data = nullptr;
  if (size > 0) {
    // MAP_NORESERVE: a private writable mapping larger than memory is fine, hardly a page is
    // written.
    void* mapped =
        ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor, 0);
    if (mapped == MAP_FAILED) {
      const int error = errno;
      ::close(descriptor);
      fail(std::strerror(error));
    }
    data = static_cast<std::byte*>(mapped);
  }
  ::close(descriptor);
  return std::shared_ptr<MappedFile>(new MappedFile(data, size));
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

}  // namespace efla
