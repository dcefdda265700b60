#include "efla/io/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

namespace efla {
namespace {

double seconds_between(std::chrono::steady_clock::time_point from,
                       std::chrono::steady_clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

size_t terminal_width(std::FILE* stream) {
  winsize size{};
  if (::ioctl(::fileno(stream), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

}  // namespace

Progress::Progress(std::string label, int64_t total, const Options& options)
    : label_(std::move(label)),
      total_(total),
      done_(options.start),
      options_(options),
      terminal_(::isatty(::fileno(options.stream)) == 1),
      begin_(std::chrono::steady_clock::now()),
      last_(begin_) {}

Progress::~Progress() { finish(); }

void Progress::update(int64_t done, const std::string& text) {
  done_ = done;
  text_ = text;
  const auto now = std::chrono::steady_clock::now();
  const double interval = terminal_ ? options_.redraw_interval : options_.log_interval;
  if (drawn_ ? seconds_between(last_, now) < interval
             : !terminal_ && seconds_between(begin_, now) < interval) {
    return;
  }
  last_ = now;
  drawn_ = true;
  const std::string line = render(terminal_);
  std::fputs(terminal_ ? ("\r" + line + "\x1b[K").c_str() : (line + "\n").c_str(), options_.stream);
  std::fflush(options_.stream);
}

void Progress::message(const std::string& line) {
  std::fputs(terminal_ ? ("\r\x1b[K" + line + "\n").c_str() : (line + "\n").c_str(),
             options_.stream);
  std::fflush(options_.stream);
}

void Progress::finish() {
  if (finished_) return;
  finished_ = true;
  const std::string line = render(terminal_);
  std::fputs(terminal_ ? ("\r" + line + "\x1b[K\n").c_str() : (line + "\n").c_str(),
             options_.stream);
  std::fflush(options_.stream);
}

std::string Progress::render(bool terminal) const {
  const double elapsed = seconds_between(begin_, std::chrono::steady_clock::now());
  const int64_t fresh = done_ - options_.start;
  const double remaining =
      fresh > 0 ? elapsed * static_cast<double>(total_ - done_) / static_cast<double>(fresh) : -1.0;
  const double fraction =
      total_ > 0 ? std::clamp(static_cast<double>(done_) / static_cast<double>(total_), 0.0, 1.0)
                 : 1.0;
  const std::string times = done_ >= total_
                                ? format_duration(elapsed)
                                : format_duration(elapsed) + " < " + format_duration(remaining);
  const std::string text = text_.empty() ? "" : "  " + text_;
  if (!terminal) {
    return fmt::format("{} {}/{} ({:.0f} %){}  {}", label_, done_, total_, 100 * fraction, text,
                       times);
  }
  const std::string tail = fmt::format(" {:3.0f} %{}  {}", 100 * fraction, text, times);
  const size_t width = terminal_width(options_.stream);
  const size_t used = label_.size() + tail.size() + 4;
  const size_t bar = used + 10 < width ? std::min<size_t>(30, width - used) : 0;
  std::string line = label_;
  if (bar > 0) {
    const auto full = static_cast<size_t>(fraction * static_cast<double>(bar));
    line += " [" + std::string(full, '=') + std::string(bar - full, ' ') + "]";
  }
  line += tail;
  return line.substr(0, width > 0 ? width - 1 : 0);  // a line that wraps could not be redrawn
}

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e9) return "--:--";
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  const int64_t hours = whole / 3600, minutes = whole / 60 % 60, rest = whole % 60;
  if (hours > 0) return fmt::format("{}:{:02}:{:02}", hours, minutes, rest);
  return fmt::format("{}:{:02}", minutes, rest);
}

std::string format_count(double count) {
  if (count >= 1e9) return fmt::format("{:.2f}G", count / 1e9);
  if (count >= 1e6) return fmt::format("{:.2f}M", count / 1e6);
  if (count >= 1e4) return fmt::format("{:.1f}k", count / 1e3);
  return fmt::format("{:.0f}", count);
}

}  // namespace efla
