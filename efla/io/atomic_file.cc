#include "efla/io/atomic_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <vector>

#include "efla/io/error.h"

namespace efla {
namespace {

namespace fs = std::filesystem;

// "cannot write X: reason", with what to do where the reason alone does not say it.
[[noreturn]] void throw_write_error(const fs::path& target, int error) {
  std::string message = "cannot write " + target.string() + ": " + std::strerror(error);
  if (error == ENOSPC || error == EDQUOT) {
    message += "; the old content is untouched: free some space and run again";
  } else if (error == EACCES || error == EPERM || error == EROFS) {
    message += "; choose a folder that you may write to";
  } else if (error == EFBIG) {
    message += "; raise the file size limit (ulimit -f) and run again";
  }
  throw Error(message);
}

fs::path parent_folder(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

void require_parent(const fs::path& target) {
  const fs::path parent = parent_folder(target);
  std::error_code code;
  if (!fs::exists(parent, code)) {
    throw Error("cannot write " + target.string() + ": the folder " + parent.string() +
                " does not exist; create it first");
  }
  if (!fs::is_directory(parent, code)) {
    throw Error("cannot write " + target.string() + ": " + parent.string() + " is not a folder");
  }
}

// Distinct among the threads and processes that write beside `target` now.
std::string unique_suffix() {
  static std::atomic<unsigned> counter{0};
  return std::to_string(getpid()) + "-" + std::to_string(counter++);
}

// Flushes a file or a folder; file systems that cannot flush folders say EINVAL, which is fine.
void flush_path(const fs::path& path, const fs::path& target) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) throw_write_error(target, errno);
  const int error = ::fsync(descriptor) == 0 ? 0 : errno;
  ::close(descriptor);
  if (error != 0 && error != EINVAL && error != EROFS) throw_write_error(target, error);
}

void flush_tree(const fs::path& folder, const fs::path& target) {
  std::error_code code;
  for (const fs::path& path : folder_entries(folder)) {
    const fs::file_type type = fs::symlink_status(path, code).type();
    if (type == fs::file_type::directory) {
      flush_tree(path, target);
    } else if (type == fs::file_type::regular) {
      flush_path(path, target);
    }
  }
  flush_path(folder, target);
}

// What stands beside `target` under a name that begins with `prefix`. A folder that cannot be read
// holds nothing to clean up; writing into it will say what is wrong.
std::vector<fs::path> siblings(const fs::path& target, const std::string& prefix) {
  std::vector<fs::path> found;
  std::error_code code;
  const fs::directory_iterator end;
  for (fs::directory_iterator it(parent_folder(target), code); !code && it != end;
       it.increment(code)) {
    if (it->path().filename().string().starts_with(prefix)) found.push_back(it->path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

// The lock that the writer of a temporary file or folder holds: the kernel drops it when the
// process dies, so that a temporary one that can be locked belongs to nobody.
class WriterLock {
 public:
  explicit WriterLock(const fs::path& path)
      : descriptor_(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC)) {
    held_ = descriptor_ >= 0 && ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0;
  }
  ~WriterLock() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  WriterLock(const WriterLock&) = delete;
  WriterLock& operator=(const WriterLock&) = delete;
  bool held() const { return held_; }

 private:
  int descriptor_;
  bool held_;
};

// Gives `temporary` the name `target`; an old folder of that name is removed afterwards.
void swap_in(const fs::path& temporary, const fs::path& target) {
  std::error_code code;
  if (!fs::exists(target, code)) {
    if (::rename(temporary.c_str(), target.c_str()) != 0) throw_write_error(target, errno);
    flush_path(parent_folder(target), target);
    return;
  }
  // One system call that exchanges both names, so that `target` exists at every moment.
  if (::syscall(SYS_renameat2, AT_FDCWD, temporary.c_str(), AT_FDCWD, target.c_str(),
                RENAME_EXCHANGE) == 0) {
    flush_path(parent_folder(target), target);
    fs::remove_all(temporary, code);
    return;
  }
  // What file systems (and sandboxes) without the exchange say.
  const bool lacking = errno == EINVAL || errno == ENOSYS || errno == EPERM || errno == EOPNOTSUPP;
  if (!lacking) throw_write_error(target, errno);
  // recover_folder() mends a death between the two renames.
  const fs::path old = target.string() + ".old-" + unique_suffix();
  if (::rename(target.c_str(), old.c_str()) != 0) throw_write_error(target, errno);
  if (::rename(temporary.c_str(), target.c_str()) != 0) {
    const int error = errno;
    fs::rename(old, target, code);
    throw_write_error(target, error);
  }
  flush_path(parent_folder(target), target);
  fs::remove_all(old, code);
}

// Trailing slashes removed, links resolved, so that NAME and its siblings are well defined.
fs::path real_target(fs::path target) {
  if (!target.has_filename()) target = target.parent_path();
  std::error_code code;
  if (!fs::is_symlink(target, code)) return target;
  fs::path real = fs::canonical(target, code);
  if (code) {
    throw Error("cannot follow the link " + target.string() + ": " + code.message() +
                "; mend or remove it");
  }
  return real;
}

// Another process takes a temporary file for abandoned in the moment between its creation and its
// lock; then it is gone, and we need another.
bool lock_own_file(int descriptor) {
  if (::flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return false;
  struct stat status;
  return ::fstat(descriptor, &status) != 0 || status.st_nlink > 0;
}

}  // namespace

AtomicFileWriter::AtomicFileWriter(fs::path target) : target_(std::move(target)) {
  require_parent(target_);
  std::error_code code;
  if (!target_.has_filename() || fs::is_directory(target_, code)) {
    throw Error("cannot write " + target_.string() + ": it is a folder, a file name is needed");
  }
  if (fs::is_symlink(target_, code) && fs::exists(target_, code)) target_ = real_target(target_);
  open_temporary();
}

// A new file, never one that is there already: names may repeat across machines that share a disk.
void AtomicFileWriter::open_temporary() {
  constexpr int kAttempts = 100;
  const std::string prefix = "." + target_.filename().string() + ".tmp-";
  std::error_code code;
  for (const fs::path& leftover : siblings(target_, prefix)) {
    if (WriterLock(leftover).held()) fs::remove(leftover, code);
  }
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    temporary_ = parent_folder(target_) / (prefix + unique_suffix());
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ < 0 && errno != EEXIST) throw_write_error(target_, errno);
    if (descriptor_ < 0) continue;
    if (lock_own_file(descriptor_)) return;
    ::close(descriptor_);
    descriptor_ = -1;
  }
  throw_write_error(target_, EEXIST);
}

AtomicFileWriter::~AtomicFileWriter() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(temporary_.c_str());
}

void AtomicFileWriter::write(const void* data, size_t bytes) {
  write_at(size_, data, bytes);
  size_ += bytes;
}

void AtomicFileWriter::write_at(size_t offset, const void* data, size_t bytes) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::pwrite(descriptor_, from, bytes, static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) throw_write_error(target_, written < 0 ? errno : ENOSPC);
    from += written;
    offset += static_cast<size_t>(written);
    bytes -= static_cast<size_t>(written);
  }
}

void AtomicFileWriter::commit() {
  if (::fsync(descriptor_) != 0 && errno != EINVAL) throw_write_error(target_, errno);
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) throw_write_error(target_, errno);
  ::close(descriptor_);
  descriptor_ = -1;
  flush_path(parent_folder(target_), target_);
}

void write_file_atomically(const fs::path& target, std::string_view content) {
  AtomicFileWriter file(target);
  file.write(content);
  file.commit();
}

void write_folder_atomically(const fs::path& target_name,
                             const std::function<void(const fs::path&)>& fill) {
  const fs::path target = real_target(target_name);
  require_parent(target);
  std::error_code code;
  if (fs::exists(target, code) && !fs::is_directory(target, code)) {
    throw Error("cannot write the folder " + target.string() + ": a file of that name exists");
  }
  recover_folder(target);
  const fs::path temporary = target.string() + ".tmp-" + unique_suffix();
  if (::mkdir(temporary.c_str(), 0777) != 0) throw_write_error(target, errno);
  const WriterLock lock(temporary);
  try {
    fill(temporary);
    flush_tree(temporary, target);
    swap_in(temporary, target);
  } catch (...) {
    fs::remove_all(temporary, code);
    throw;
  }
}

void recover_folder(const fs::path& target_name) {
  const fs::path target = real_target(target_name);
  std::error_code code;
  for (const fs::path& old : siblings(target, target.filename().string() + ".old-")) {
    if (fs::exists(target, code)) {
      fs::remove_all(old, code);
    } else {
      fs::rename(old, target, code);
    }
  }
  for (const fs::path& leftover : siblings(target, target.filename().string() + ".tmp-")) {
    if (WriterLock(leftover).held()) fs::remove_all(leftover, code);
  }
}

void read_in_pieces(const fs::path& path, const std::function<void(std::string_view)>& use) {
  const auto fail = [&](const std::string& reason) {
    throw Error("cannot read " + path.string() + ": " + reason);
  };
  std::error_code code;
  if (fs::is_directory(path, code)) fail("it is a folder, a file is needed");
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail(std::strerror(errno));
  std::vector<char> buffer(1 << 16);
  int error = 0;
  while (true) {
    const ssize_t got = ::read(descriptor, buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) error = errno;
    if (got <= 0) break;
    use(std::string_view(buffer.data(), static_cast<size_t>(got)));
  }
  ::close(descriptor);
  if (error != 0) fail(std::strerror(error));
}

std::string read_file(const fs::path& path) {
  std::string content;
  std::error_code code;
  const auto size = fs::file_size(path, code);
  if (!code) content.reserve(size);
  read_in_pieces(path, [&content](std::string_view piece) { content.append(piece); });
  return content;
}

bool path_exists(const fs::path& path) {
  std::error_code code;
  const bool found = fs::exists(path, code);
  if (code) {
    throw Error("cannot look at " + path.string() + ": " + code.message() +
                "; mend that or choose another path");
  }
  return found;
}

bool is_folder(const fs::path& path) {
  std::error_code code;
  return path_exists(path) && fs::is_directory(path, code);
}

std::vector<fs::path> folder_entries(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code code;
  const fs::directory_iterator end;
  for (fs::directory_iterator it(folder, code); !code && it != end; it.increment(code)) {
    found.push_back(it->path());
  }
  if (code) {
    throw Error("cannot read the folder " + folder.string() + ": " + code.message() +
                "; mend that or choose another folder");
  }
  std::sort(found.begin(), found.end());
  return found;
}

void make_folder(const fs::path& path) {
  std::error_code code;
  fs::create_directories(path, code);
  std::error_code ignored;
  if (code || !fs::is_directory(path, ignored)) {
    throw Error("cannot create the folder " + path.string() + ": " +
                (code ? code.message() : std::string("a file of that name exists")));
  }
}

FileLock::FileLock(const fs::path& path) {
  require_parent(path);
  descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor_ < 0) throw_write_error(path, errno);
  if (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    ::close(descriptor_);
    if (error != EWOULDBLOCK) throw_write_error(path, error);
    throw Error("another process is using " + parent_folder(path).string() + " (it holds " +
                path.filename().string() + "): wait for it or choose another folder");
  }
}

FileLock::~FileLock() { ::close(descriptor_); }

}  // namespace efla
