#include "efla/eval/stop_strings.h"

#include <algorithm>
#include <utility>

#include "efla/io/error.h"

namespace efla {
namespace {

// Length of the longest proper beginning of `stop` with which `text` ends.
size_t partial_match(std::string_view text, std::string_view stop) {
  for (size_t length = std::min(text.size(), stop.size() - 1); length > 0; --length) {
    if (text.substr(text.size() - length) == stop.substr(0, length)) return length;
  }
  return 0;
}

}  // namespace

StopMatcher::StopMatcher(std::vector<std::string> stop_strings)
    : stop_strings_(std::move(stop_strings)) {
  for (const std::string& stop : stop_strings_) {
    if (stop.empty()) throw UsageError("a stop string is empty; give at least one character");
  }
}

std::string StopMatcher::push(std::string_view text) {
  if (stopped_) return "";
  held_ += text;
  // The match that is complete first wins, as it would have if the text had come byte by byte.
  size_t match = std::string::npos;
  size_t match_end = std::string::npos;
  size_t keep = 0;
  for (const std::string& stop : stop_strings_) {
    const size_t begin = held_.find(stop);
    if (begin != std::string::npos) {
      const size_t end = begin + stop.size();
      if (end < match_end || (end == match_end && begin < match)) {
        match = begin;
        match_end = end;
      }
    }
    keep = std::max(keep, partial_match(held_, stop));
  }
  stopped_ = match != std::string::npos;
  std::string shown = held_.substr(0, stopped_ ? match : held_.size() - keep);
  held_ = stopped_ ? "" : held_.substr(shown.size());
  return shown;
}

std::string StopMatcher::finish() { return std::exchange(held_, ""); }

}  // namespace efla
