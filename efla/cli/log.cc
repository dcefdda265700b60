#include "efla/cli/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>

namespace efla::cli {

void log_to_stderr() {
  auto logger =
      std::make_shared<spdlog::logger>("efla", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_pattern("%n: %l: %v");
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace efla::cli
