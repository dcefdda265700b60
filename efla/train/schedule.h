// The learning rate of each update: linear warm-up, then a cosine down to a floor.
#pragma once

#include <cstdint>

#include "efla/train/recipe.h"

namespace efla {

class Schedule {
 public:
  Schedule(const ScheduleRecipe& recipe, double peak, int64_t total_steps);

  /// Learning rate of update `step`, 1 <= step <= total_steps. With w warm-up steps and n in all,
  ///   step <= w:  peak * (start + (1 - start) * step / w)
  ///   step >  w:  peak * (floor + (1 - floor) * (1 + cos(pi * (step - w) / (n - w))) / 2)
  /// so update w has the peak and update n has the floor, exactly.
  double learning_rate(int64_t step) const;

 private:
  ScheduleRecipe recipe_;
  double peak_;
  int64_t total_steps_;
};

}  // namespace efla
