// Records of an evaluation set's file, each with its place for messages.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace efla {

/// One JSON object of a task file. The getters throw Error naming file, line and field.
class TaskRecord {
 public:
  TaskRecord(nlohmann::json object, std::string origin)
      : object_(std::move(object)), origin_(std::move(origin)) {}

  const std::string& origin() const { return origin_; }  // "PATH:LINE"
  bool has(const std::string& key) const { return object_.contains(key); }
  const nlohmann::json& object() const { return object_; }

  std::string text(const std::string& key) const;
  /// Text that may not be empty.
  std::string full_text(const std::string& key) const;
  std::vector<std::string> texts(const std::string& key) const;
  /// An integer, also one written as a string ("1") or as true and false.
  int64_t integer(const std::string& key) const;
  /// A field of any kind.
  const nlohmann::json& at(const std::string& key) const;

  /// Error "PATH:LINE: MESSAGE".
  [[noreturn]] void fail(const std::string& message) const;

 private:
  nlohmann::json object_;
  std::string origin_;
};

/// The records of a file (plain, .gz or .xz) of JSON lines, or of one JSON array of objects. Throws
/// Error naming the file and the line of what is not a JSON object or not UTF-8.
std::vector<TaskRecord> read_task_records(const std::string& path);

/// The same of text that is at hand.
std::vector<TaskRecord> parse_task_records(std::string_view text, const std::string& path);

/// Lines of a file without their newlines; blank lines at the end are left out.
std::vector<std::string> read_lines(const std::string& path);

}  // namespace efla
