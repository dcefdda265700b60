#include "efla/io/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "efla/io/atomic_file.h"
#include "efla/io/error.h"

namespace efla {
namespace {

// Calls use(line, number) for each line that ends in a newline; a half-written last line is left
// out.
template <typename Use>
void for_each_whole_line(const std::string& text, const Use& use) {
  int64_t number = 1;
  size_t begin = 0;
  for (size_t end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1, ++number) {
    use(std::string_view(text).substr(begin, end - begin), number);
  }
}

// The lines of the log up to and including `step`. A line that cannot be read goes: no run would
// miss it.
std::string lines_until(const std::string& text, int64_t step) {
  std::string kept;
  for_each_whole_line(text, [&](std::string_view line, int64_t) {
    const auto object = nlohmann::json::parse(line, nullptr, false);
    if (!object.is_object()) return;
    const auto found = object.find("step");
    if (found != object.end() && found->is_number() &&
        found->get<double>() > static_cast<double>(step)) {
      return;
    }
    kept.append(line).push_back('\n');
  });
  return kept;
}

}  // namespace

MetricsLog::MetricsLog(const std::filesystem::path& path, std::optional<int64_t> resume_step)
    : path_(path) {
  std::error_code code;
  std::string kept;
  if (resume_step && std::filesystem::exists(path, code))
    kept = lines_until(read_file(path), *resume_step);
  write_file_atomically(path, kept);
  descriptor_ = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (descriptor_ < 0) throw Error("cannot write " + path.string() + ": " + std::strerror(errno));
}

MetricsLog::~MetricsLog() { ::close(descriptor_); }

void MetricsLog::write(const nlohmann::json& object) {
  // dump() writes NaN and infinities as null.
  pending_ += object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  write_pending();
}

void MetricsLog::write_pending() {
  while (!pending_.empty()) {
    const ssize_t written = ::write(descriptor_, pending_.data(), pending_.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      throw Error("cannot write " + path_.string() + ": " +
                  std::strerror(written < 0 ? errno : ENOSPC));
    }
    pending_.erase(0, static_cast<size_t>(written));
  }
}

void MetricsLog::sync() {
  write_pending();
  if (::fsync(descriptor_) != 0 && errno != EINVAL) {  // EINVAL: a pipe or the like
    throw Error("cannot write " + path_.string() + ": " + std::strerror(errno));
  }
}

std::vector<nlohmann::json> read_metrics(const std::filesystem::path& path) {
  std::vector<nlohmann::json> objects;
  for_each_whole_line(read_file(path), [&](std::string_view line, int64_t number) {
    objects.push_back(nlohmann::json::parse(line, nullptr, false));
    if (!objects.back().is_object()) {
      throw Error(path.string() + " line " + std::to_string(number) + " is not a JSON object");
    }
  });
  return objects;
}

}  // namespace efla
