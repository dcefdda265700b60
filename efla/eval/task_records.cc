#include "efla/eval/task_records.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "efla/eval/python_text.h"
#include "efla/io/documents.h"
#include "efla/io/error.h"
#include "efla/io/utf8.h"

namespace efla {
namespace {

TaskRecord parse_object(std::string_view text, const std::string& origin) {
  nlohmann::json object = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (object.is_discarded()) {
    throw Error(origin + " is not valid JSON; every record must be one object, restore the file");
  }
  if (!object.is_object()) {
    throw Error(origin + " is not a JSON object; every record must be one object");
  }
  return {std::move(object), origin};
}

std::string place(const std::string& path, std::string_view text, size_t offset) {
  const auto end = text.begin() + static_cast<ptrdiff_t>(offset);
  return fmt::format("{}:{}", path, std::count(text.begin(), end, '\n') + 1);
}

// Offset behind the JSON value that begins at `begin`, found by its brackets; the value itself is
// parsed later. npos when the text ends before it does.
size_t end_of_value(std::string_view text, size_t begin) {
  int64_t depth = 0;
  bool in_string = false;
  for (size_t i = begin; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
      continue;
    }
    if (c == '"') in_string = true;
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
    if (depth < 0 || (depth == 0 && c == ',')) return i;
  }
  return std::string_view::npos;
}

std::vector<TaskRecord> parse_array(std::string_view text, const std::string& path) {
  std::vector<TaskRecord> records;
  size_t i = text.find('[') + 1;
  while (true) {
    const size_t begin = text.find_first_not_of(" \t\r\n", i);
    const size_t end = begin == std::string_view::npos ? begin : end_of_value(text, begin);
    if (end == std::string_view::npos) {
      throw Error(place(path, text, std::min(i, text.size())) +
                  ": the array of records does not end; restore the file");
    }
    const bool empty_array = begin == end && text[end] == ']' && records.empty();
    if (!empty_array) {
      records.push_back(parse_object(text.substr(begin, end - begin), place(path, text, begin)));
    }
    if (text[end] == ']') break;
    i = end + 1;
  }
  return records;
}

}  // namespace

void TaskRecord::fail(const std::string& message) const { throw Error(origin_ + ": " + message); }

const nlohmann::json& TaskRecord::at(const std::string& key) const {
  const auto found = object_.find(key);
  if (found == object_.end()) fail(fmt::format("the field \"{}\" is missing", key));
  return *found;
}

std::string TaskRecord::text(const std::string& key) const {
  const nlohmann::json& value = at(key);
  if (!value.is_string()) fail(fmt::format("the field \"{}\" must be a text", key));
  return value.get<std::string>();
}

std::string TaskRecord::full_text(const std::string& key) const {
  std::string value = text(key);
  if (strip(value).empty()) fail(fmt::format("the field \"{}\" is empty", key));
  return value;
}

std::vector<std::string> TaskRecord::texts(const std::string& key) const {
  std::vector<std::string> values;
  const nlohmann::json& array = at(key);
  const bool fits = array.is_array() && std::all_of(array.begin(), array.end(),
                                                    [](const auto& e) { return e.is_string(); });
  if (!fits) fail(fmt::format("the field \"{}\" must be a list of texts", key));
  for (const nlohmann::json& element : array) values.push_back(element.get<std::string>());
  return values;
}

int64_t TaskRecord::integer(const std::string& key) const {
  const nlohmann::json& value = at(key);
  if (value.is_boolean()) return value.get<bool>() ? 1 : 0;
  if (value.is_number_integer()) return value.get<int64_t>();
  int64_t parsed = 0;
  if (value.is_string()) {
    const auto& digits = value.get_ref<const std::string&>();
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), parsed);
    if (error == std::errc() && end == digits.data() + digits.size()) return parsed;
  }
  fail(fmt::format("the field \"{}\" must be an integer", key));
}

std::vector<TaskRecord> parse_task_records(std::string_view text, const std::string& path) {
  validate_utf8(text, path);
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first != std::string_view::npos && text[first] == '[') return parse_array(text, path);
  std::vector<TaskRecord> records;
  int64_t number = 1;
  for (size_t begin = 0; begin < text.size(); ++number) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    if (!strip(line).empty()) {
      records.push_back(parse_object(line, fmt::format("{}:{}", path, number)));
    }
    begin = end + 1;
  }
  return records;
}

std::vector<TaskRecord> read_task_records(const std::string& path) {
  return parse_task_records(read_text_file(path), path);
}

std::vector<std::string> read_lines(const std::string& path) {
  const std::string text = read_text_file(path);
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.emplace_back(strip_right(std::string_view(text).substr(begin, end - begin)));
    begin = end + 1;
  }
  while (!lines.empty() && lines.back().empty()) lines.pop_back();
  return lines;
}

}  // namespace efla
