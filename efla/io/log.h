// Messages to the person who runs a program, on stderr.
#pragma once

#include <string>

namespace efla {

/// One line "efla: warning: ..." on stderr; stdout is for results. spdlog behind a plain function:
/// torch's headers bring their own fmt, with which Debian's spdlog does not compile, so rooms that
/// use torch log through this.
void log_warning(const std::string& message);

}  // namespace efla
