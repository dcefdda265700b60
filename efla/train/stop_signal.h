// Ctrl-C and SIGTERM as a request that the loop looks at between steps.
#pragma once

namespace efla {

/// While alive, the first SIGINT or SIGTERM is only noted; a second one ends the process at once
/// with exit code 1. The former handlers come back on destruction. One object at a time.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  /// "SIGINT" or "SIGTERM" once one came, else nullptr.
  static const char* received();
};

}  // namespace efla
