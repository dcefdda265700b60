// Files and folders that appear whole or not at all.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace efla {

/// Writes one file atomically: the bytes go to a hidden temporary file in the same folder, which
/// commit() flushes to the disk and renames over the target. Until then the target is untouched;
/// without a commit the destructor removes the temporary file, and the next writer of the target
/// those of killed processes. Every failure (no such folder, not writable, disk full) is an
/// efla::Error that names the target.
class AtomicFileWriter {
 public:
  explicit AtomicFileWriter(std::filesystem::path target);
  ~AtomicFileWriter();
  AtomicFileWriter(const AtomicFileWriter&) = delete;
  AtomicFileWriter& operator=(const AtomicFileWriter&) = delete;

  /// Appends bytes (buffering is left to the kernel: write in large pieces).
  void write(const void* data, size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// Overwrites bytes written earlier, for headers whose content is known last.
  void write_at(size_t offset, const void* data, size_t bytes);
  /// Bytes appended so far.
  size_t size() const { return size_; }
  /// The temporary file, for a program that writes the content in our place.
  const std::filesystem::path& temporary() const { return temporary_; }
  /// fsync, rename over the target, fsync the folder.
  void commit();

 private:
  void open_temporary();

  std::filesystem::path target_, temporary_;
  int descriptor_ = -1;
  size_t size_ = 0;
};

/// AtomicFileWriter for content that is at hand.
void write_file_atomically(const std::filesystem::path& target, std::string_view content);

/// Fills the folder `target` atomically: `fill` writes into a fresh sibling folder "NAME.tmp-*";
/// afterwards every file is flushed and the folder takes the name `target`, replacing a folder of
/// that name. When anything fails (also when `fill` throws) the old folder is still there and the
/// temporary one is gone. Leftovers of killed runs are removed first.
void write_folder_atomically(const std::filesystem::path& target,
                             const std::function<void(const std::filesystem::path&)>& fill);

/// Removes leftovers "NAME.tmp-*" that a killed run of write_folder_atomically left beside
/// `target`, and brings the old folder back when the run died between its two renames. Call it
/// before reading a folder that may have been replaced by a killed process.
void recover_folder(const std::filesystem::path& target);

/// The whole file as bytes; an efla::Error says which file is missing, a folder, or unreadable.
std::string read_file(const std::filesystem::path& path);

/// The same in pieces of bounded size, for files that need not fit into memory.
void read_in_pieces(const std::filesystem::path& path,
                    const std::function<void(std::string_view piece)>& use);

/// Whether something is there; an efla::Error naming the path when that cannot be found out (no
/// right to look, a failing disk), which must not pass for "not there".
bool path_exists(const std::filesystem::path& path);
/// Whether a folder is there, likewise.
bool is_folder(const std::filesystem::path& path);
/// What a folder holds, sorted; an efla::Error naming it when it cannot be read.
std::vector<std::filesystem::path> folder_entries(const std::filesystem::path& folder);

/// Creates a folder and its parents, or says why that cannot be.
void make_folder(const std::filesystem::path& path);

/// Holds an advisory lock on the file `path` (created when missing) so that two runs do not write
/// into the same folder; throws an efla::Error at once when another process holds it. Released by
/// the destructor and by the kernel when the process dies.
class FileLock {
 public:
  explicit FileLock(const std::filesystem::path& path);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int descriptor_ = -1;
};

}  // namespace efla
