// Messages to the person who runs a program, on stderr.
#pragma once

#include <string>

namespace efla {

/// spdlog behind two plain functions: torch's headers bring their own fmt, with which Debian's
/// spdlog does not compile, so rooms that use torch log through these.
void log_info(const std::string& message);
void log_warning(const std::string& message);

}  // namespace efla
