// The numbers of a run: metrics.jsonl as it grows, and the same as curves for the picture.
//
// One JSON object a line. {"type": "train", "step", "loss" (nats per token), "learning_rate",
// "gradient_norm" (before clipping), "tokens" (targets trained on so far), "skipped_steps",
// "tokens_per_second", "seconds"} after each update, {"type": "valid", "step", "loss", "convention"
// ("rows-LENGTH", held_out.h), "tokens" (predicted), "bytes" (of their text), "bits_per_byte"}
// before the first update and after each evaluation. Losses are written so
// that they read back bit for bit.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "efla/io/metrics.h"
#include "efla/train/held_out.h"

namespace efla {

struct StepReport {
  int64_t step = 0;
  double loss = 0;           // nats per target token
  double gradient_norm = 0;  // before clipping
  double learning_rate = 0;
  bool skipped = false;
  int64_t tokens = 0;  // that the update read
  double seconds = 0;
};

struct HeldOutPoint {
  int64_t step = 0;
  double loss = std::numeric_limits<double>::quiet_NaN();  // nats per token
  double bits_per_byte = std::numeric_limits<double>::quiet_NaN();
  int64_t tokens = 0;  // predicted
};

class RunLog {
 public:
  /// `resume_step`: keep the lines up to that step (0: none but those of step 0); absent: start
  /// anew.
  RunLog(const std::filesystem::path& path, std::optional<int64_t> resume_step);

  void train(const StepReport& report, int64_t tokens_seen, int64_t skipped_steps, double seconds);
  void valid(int64_t step, const HeldOutLoss& loss);

  using Points = std::vector<std::pair<double, double>>;  // step, loss
  const Points& train_losses() const { return train_; }
  const std::vector<HeldOutPoint>& held_out() const { return held_out_; }

  /// Returns when every line is on the disk.
  void sync() { log_.sync(); }

  /// Draws both curves; returns whether gnuplot was there to do it.
  bool draw(const std::filesystem::path& png, const std::string& title) const;

 private:
  void read_history(const std::filesystem::path& path);

  Points train_;
  std::vector<HeldOutPoint> held_out_;
  MetricsLog log_;
};

}  // namespace efla
