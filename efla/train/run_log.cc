#include "efla/train/run_log.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "efla/io/plot.h"

namespace efla {

using nlohmann::json;

RunLog::RunLog(const std::filesystem::path& path, std::optional<int64_t> resume_step)
    : log_(path, resume_step) {
  if (resume_step) read_history(path);
}

void RunLog::read_history(const std::filesystem::path& path) {
  // A skipped update's NaN is null in the file.
  const auto number = [](const json& line, const char* key) {
    const json value = line.value(key, json());
    return value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN();
  };
  for (const json& line : read_metrics(path)) {
    if (line.value("type", "") == "valid") {
      held_out_.push_back({line.value("step", int64_t{0}), number(line, "loss"),
                           number(line, "bits_per_byte"), line.value("tokens", int64_t{0})});
    } else {
      train_.emplace_back(line.value("step", 0.0), number(line, "loss"));
    }
  }
}

void RunLog::train(const StepReport& report, int64_t tokens_seen, int64_t skipped_steps,
                   double seconds) {
  train_.emplace_back(static_cast<double>(report.step), report.loss);
  log_.write({{"type", "train"},
              {"step", report.step},
              {"loss", report.loss},
              {"learning_rate", report.learning_rate},
              {"gradient_norm", report.gradient_norm},
              {"tokens", tokens_seen},
              {"skipped_steps", skipped_steps},
              {"tokens_per_second", static_cast<double>(report.tokens) / report.seconds},
              {"seconds", seconds}});
}

void RunLog::valid(int64_t step, const HeldOutLoss& loss) {
  held_out_.push_back({step, loss.per_token(), loss.bits_per_byte(), loss.targets});
  log_.write({{"type", "valid"},
              {"step", step},
              {"loss", loss.per_token()},
              {"convention", loss.convention()},
              {"tokens", loss.targets},
              {"bytes", loss.bytes},
              {"bits_per_byte", loss.bits_per_byte()}});
}

bool RunLog::draw(const std::filesystem::path& png, const std::string& title) const {
  Plot plot;
  plot.title = title;
  plot.x_label = "step";
  plot.y_label = "loss (nats per token)";
  plot.curves.push_back({"training", train_});
  Points valid;
  for (const HeldOutPoint& point : held_out_) {
    valid.emplace_back(static_cast<double>(point.step), point.loss);
  }
  if (!valid.empty()) plot.curves.push_back({"held out", valid});
  return draw_plot(png, plot);
}

}  // namespace efla
