// Where warnings go.
#pragma once

namespace efla::cli {

/// Sends the program's log to stderr, one line "efla: warning: ..." each; stdout is for results.
void log_to_stderr();

}  // namespace efla::cli
