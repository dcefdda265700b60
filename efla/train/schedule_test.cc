#include "efla/train/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

namespace efla {
namespace {

ScheduleRecipe shape(int64_t warmup, double start, double floor) {
  ScheduleRecipe recipe;
  recipe.warmup_steps = warmup;
  recipe.start = start;
  recipe.floor = floor;
  return recipe;
}

TEST(Schedule, WarmUpPeakAndFloorAreExact) {
  const Schedule schedule(shape(10, 0, 0.1), 4e-4, 110);
  EXPECT_DOUBLE_EQ(schedule.learning_rate(1), 4e-5);
  EXPECT_DOUBLE_EQ(schedule.learning_rate(5), 2e-4);
  EXPECT_EQ(schedule.learning_rate(10), 4e-4);
  EXPECT_EQ(schedule.learning_rate(110), 4e-4 * 0.1);
}

TEST(Schedule, CosineAtQuarterHalfAndThreeQuarters) {
  const Schedule schedule(shape(10, 0, 0.2), 1.0, 110);
  EXPECT_NEAR(schedule.learning_rate(35), 0.2 + 0.8 * (1 + std::sqrt(0.5)) / 2, 1e-15);
  EXPECT_NEAR(schedule.learning_rate(60), 0.6, 1e-15);
  EXPECT_NEAR(schedule.learning_rate(85), 0.2 + 0.8 * (1 - std::sqrt(0.5)) / 2, 1e-15);
}

TEST(Schedule, WarmUpMayStartAboveZero) {
  // The paper's runs begin and end at a tenth of the peak.
  const Schedule schedule(shape(100, 0.1, 0.1), 3e-4, 1000);
  EXPECT_NEAR(schedule.learning_rate(1), 3e-4 * (0.1 + 0.9 / 100), 1e-18);
  EXPECT_EQ(schedule.learning_rate(100), 3e-4);
}

TEST(Schedule, WithoutWarmUpTheCosineStartsAtOnce) {
  const Schedule schedule(shape(0, 0, 0), 1.0, 4);
  EXPECT_NEAR(schedule.learning_rate(1), (1 + std::sqrt(0.5)) / 2, 1e-15);
  EXPECT_NEAR(schedule.learning_rate(2), 0.5, 1e-15);
  EXPECT_EQ(schedule.learning_rate(4), 0);
}

TEST(Schedule, WarmUpAsLongAsTheRunEndsAtThePeak) {
  const Schedule schedule(shape(4, 0, 0), 1.0, 4);
  EXPECT_EQ(schedule.learning_rate(2), 0.5);
  EXPECT_EQ(schedule.learning_rate(4), 1.0);
}

}  // namespace
}  // namespace efla
