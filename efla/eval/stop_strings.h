// Ending a text at given strings while it is being streamed.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace efla {

/// Passes text through until one of the stop strings appears, also when it is spread over several
/// pieces; text that may yet turn out to be the beginning of a stop string is held back. The stop
/// string itself is never passed on.
class StopMatcher {
 public:
  /// Throws UsageError for an empty stop string, which would end every text at once.
  explicit StopMatcher(std::vector<std::string> stop_strings);

  /// Adds text; returns what can be shown now. After a match everything is swallowed.
  std::string push(std::string_view text);

  /// The text that was held back, once no more will come.
  std::string finish();

  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stop_strings_;
  std::string held_;  // shorter than the longest stop string
  bool stopped_ = false;
};

}  // namespace efla
