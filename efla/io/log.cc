#include "efla/io/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>

namespace efla {
namespace {

// Not in spdlog's registry: a name registered twice is an error there, and this is the only logger.
spdlog::logger& logger() {
  static const std::shared_ptr<spdlog::logger> instance = [] {
    auto made =
        std::make_shared<spdlog::logger>("efla", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("%n: %l: %v");
    return made;
  }();
  return *instance;
}

}  // namespace

void log_warning(const std::string& message) { logger().warn(message); }

}  // namespace efla
