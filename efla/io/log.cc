#include "efla/io/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

namespace efla {
namespace {

// stdout is for results.
spdlog::logger& logger() {
  static const std::shared_ptr<spdlog::logger> instance = [] {
    auto made = spdlog::stderr_color_mt("efla");
    made->set_pattern("%^%l%$: %v");
    return made;
  }();
  return *instance;
}

}  // namespace

void log_info(const std::string& message) { logger().info(message); }
void log_warning(const std::string& message) { logger().warn(message); }

}  // namespace efla
