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
  for (const json& line : read_metrics(path)) {
    // A skipped update's NaN is null in the file.
    const json loss = line.value("loss", json());
    const double value =
        loss.is_number() ? loss.get<double>() : std::numeric_limits<double>::quiet_NaN();
    const double step = line.value("step", 0.0);
    (line.value("type", "") == "valid" ? valid_ : train_).emplace_back(step, value);
  }
}

void RunLog::train(const StepReport& report, int64_t tokens_seen, int64_t skipped_steps,
                   double seconds) {
  log_.write({{"type", "train"},
              {"step", report.step},
              {"loss", report.loss},
              {"learning_rate", report.learning_rate},
              {"gradient_norm", report.gradient_norm},
              {"tokens", tokens_seen},
              {"skipped_steps", skipped_steps},
              {"tokens_per_second", static_cast<double>(report.tokens) / report.seconds},
              {"seconds", seconds}});
  train_.emplace_back(static_cast<double>(report.step), report.loss);
}

void RunLog::valid(int64_t step, const HeldOutLoss& loss) {
  json line = {
      {"type", "valid"}, {"step", step}, {"loss", loss.per_token()}, {"tokens", loss.targets}};
  if (loss.whole) line["bits_per_byte"] = loss.bits_per_byte();
  log_.write(line);
  valid_.emplace_back(static_cast<double>(step), loss.per_token());
}

bool RunLog::draw(const std::filesystem::path& png, const std::string& title) const {
  Plot plot;
  plot.title = title;
  plot.x_label = "step";
  plot.y_label = "loss (nats per token)";
  plot.curves.push_back({"training", train_});
  if (!valid_.empty()) plot.curves.push_back({"held out", valid_});
  return draw_plot(png, plot);
}

}  // namespace efla
