// Progress on a terminal or in a log.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

namespace efla {

/// On a terminal: one line that redraws itself (bar, percentage, the caller's text, elapsed and
/// remaining time). Elsewhere: a plain line every `log_interval` seconds and at the end.
class Progress {
 public:
  struct Options {
    double log_interval = 10.0;    ///< seconds between lines when not on a terminal
    double redraw_interval = 0.1;  ///< seconds between redraws on a terminal
    int64_t start =
        0;  ///< units already done before this run (a resumed run): not counted for the rate
    std::FILE* stream = stderr;
  };
  Progress(std::string label, int64_t total, const Options& options);
  Progress(std::string label, int64_t total) : Progress(std::move(label), total, Options()) {}
  ~Progress();  ///< ends the line if finish() was not called
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// `done` units of `total`; `text` is shown as given ("loss 3.21, 12.3k tokens/s").
  void update(int64_t done, const std::string& text = "");
  /// Prints a line above the bar (an evaluation result, a warning).
  void message(const std::string& line);
  void finish();

 private:
  std::string render(bool terminal) const;
  std::string label_, text_;
  int64_t total_, done_;
  Options options_;
  bool terminal_, finished_ = false, drawn_ = false;
  std::chrono::steady_clock::time_point begin_, last_;
};

/// 75 -> "1:15", 3723 -> "1:02:03"; negative or not finite -> "--:--".
std::string format_duration(double seconds);

/// 12345 -> "12.3k", 2.5e6 -> "2.50M".
std::string format_count(double count);

}  // namespace efla
