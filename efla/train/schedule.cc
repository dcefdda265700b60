#include "efla/train/schedule.h"

#include <cmath>
#include <numbers>

namespace efla {

Schedule::Schedule(const ScheduleRecipe& recipe, double peak, int64_t total_steps)
    : recipe_(recipe), peak_(peak), total_steps_(total_steps) {}

double Schedule::learning_rate(int64_t step) const {
  const int64_t warmup = recipe_.warmup_steps;
  if (step <= warmup) {
    const double progress = static_cast<double>(step) / static_cast<double>(warmup);
    return peak_ * (recipe_.start + (1 - recipe_.start) * progress);
  }
  const double progress =
      static_cast<double>(step - warmup) / static_cast<double>(total_steps_ - warmup);
  // cos(pi) is -1 exactly, so the last update has the floor exactly.
  const double cosine = (1 + std::cos(std::numbers::pi * progress)) / 2;
  return peak_ * (recipe_.floor + (1 - recipe_.floor) * cosine);
}

}  // namespace efla
