// Metrics of a run as JSON lines.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace efla {

/// An append-only file of one JSON object a line, handed to the kernel per line, so that a killed
/// run leaves whole lines.
class MetricsLog {
 public:
  /// Opens for appending. With `resume_step`, lines whose "step" is larger and a half-written last
  /// line are dropped first (atomically): a resumed run writes those steps again. Without it an
  /// older file is replaced.
  explicit MetricsLog(const std::filesystem::path& path,
                      std::optional<int64_t> resume_step = std::nullopt);
  ~MetricsLog();
  MetricsLog(const MetricsLog&) = delete;
  MetricsLog& operator=(const MetricsLog&) = delete;

  /// Appends one object. NaN and infinities, which JSON lacks, are written as null.
  /// On an error (a full disk) the line is kept and written first by the next call.
  void write(const nlohmann::json& object);
  /// Returns when every line is on the disk.
  void sync();

 private:
  void write_pending();

  std::filesystem::path path_;
  int descriptor_ = -1;
  std::string pending_;  // not yet taken by the kernel
};

/// All whole lines of a log. Errors: a missing file, a line before the last that is not a JSON
/// object (with its number).
std::vector<nlohmann::json> read_metrics(const std::filesystem::path& path);

}  // namespace efla
