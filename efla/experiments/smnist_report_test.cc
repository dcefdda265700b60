#include "efla/experiments/smnist_report.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "efla/io/test_util.h"

namespace efla {
namespace {

using testing::error_of;
using testing::slurp;
using testing::TempFolder;

nlohmann::json run(const std::string& arm, double rate, int seed, double clean, double loss,
                   const std::vector<double>& intensity) {
  return {{"arm", arm},
          {"learning_rate", rate},
          {"seed", seed},
          {"final_loss", loss},
          {"diverged", false},
          {"clean", clean},
          {"intensity", intensity},
          {"noise", {clean, 0.3}},
          {"dropout", {clean, 0.2}},
          {"setting", {{"intensity", {1, 5, 10}}, {"noise", {0, 1}}, {"dropout", {0, 0.5}}}}};
}

nlohmann::json diverged(const std::string& arm, double rate, int seed) {
  nlohmann::json line = run(arm, rate, seed, 0, 0, {0, 0, 0});
  line["diverged"] = true;
  line["final_loss"] = nullptr;
  return line;
}

std::vector<nlohmann::json> sample() {
  return {run("deltanet", 1e-3, 43, 0.90, 0.5, {0.90, 0.6, 0.4}),
          run("efla", 3e-3, 43, 0.94, 0.2, {0.94, 0.8, 0.7}),
          run("efla", 3e-3, 44, 0.96, 0.4, {0.96, 0.6, 0.5}),
          run("efla", 1e-3, 43, 0.99, 0.9, {0.99, 0.9, 0.9}),  // better, but not by the loss
          run("rk2", 1e-3, 43, 0.80, 0.6, {0.8, 0.1, 0.1}),
          diverged("rk2", 3e-3, 43),
          diverged("euler_raw", 3e-3, 43)};
}

TEST(SmnistReport, SpreadIsMeanAndSampleDeviation) {
  const Spread two = spread_of({1, 3});
  EXPECT_EQ(two.mean, 2);
  EXPECT_NEAR(two.sd, std::sqrt(2.0), 1e-15);
  EXPECT_EQ(two.count, 2);
  EXPECT_TRUE(std::isnan(spread_of({1}).sd));
  EXPECT_TRUE(std::isnan(spread_of({}).mean));
}

TEST(SmnistReport, TablesHoldMeansOverSeeds) {
  const std::string tables = smnist_tables(sample(), "runs.jsonl");
  EXPECT_MENTIONS(tables, "| arm | 0.001 | 0.003 |");
  EXPECT_MENTIONS(tables, "| EFLA | 99.0 | 95.0 ± 1.4 |");
  EXPECT_MENTIONS(tables, "| RK-2 | 80.0 | 0.0 (1 diverged) |");
  EXPECT_MENTIONS(tables, "| DeltaNet | 90.0 | - |");
  // Corrupted: means of 0.8, 0.7 and of 0.6, 0.5.
  EXPECT_MENTIONS(tables, "Accuracy under intensity");
  EXPECT_MENTIONS(tables, "| EFLA | 90.0 | 65.0 ± 14.1 |");
}

// The best rate has the lowest training loss (0.3 against 0.9) and no diverged run, whatever the
// test accuracy.
TEST(SmnistReport, TheBestRateIsThatOfTheLowestTrainingLoss) {
  const std::string tables = smnist_tables(sample(), "runs.jsonl");
  // Corrupted: mean of 0.8, 0.7 and of 0.6, 0.5: 75 and 55 percent.
  EXPECT_MENTIONS(
      tables, "| EFLA | 0.003 | 2 | 0.3000 | 95.0 ± 1.4 | 65.0 ± 14.1 | 30.0 ± 0.0 | 20.0 ± 0.0 |");
  EXPECT_MENTIONS(tables, "| RK-2 | 0.001 | 1 | 0.6000 |");
  EXPECT_MENTIONS(tables, "| Euler, raw keys | all diverged |");
}

// Of seeds 1, 2 and 3 EFLA is 10, 20 points ahead and 6 behind: 8 +- 13.1; the seeds that only one
// arm has, and the pair whose partner diverged, do not count.
TEST(SmnistReport, DifferencesAreThoseOfEqualSeeds) {
  std::vector<nlohmann::json> lines;
  const double efla[] = {0.90, 0.90, 0.80, 0.99, 0.99}, deltanet[] = {0.80, 0.70, 0.86};
  for (int seed = 1; seed <= 5; ++seed) {
    lines.push_back(run("efla", 1e-3, seed, efla[seed - 1], 0.2, {0.9, 0.9, 0.5}));
  }
  for (int seed = 3; seed >= 1; --seed) {
    lines.push_back(run("deltanet", 1e-3, seed, deltanet[seed - 1], 0.2, {0.9, 0.5, 0.5}));
  }
  lines.push_back(diverged("deltanet", 1e-3, 4));
  lines.push_back(run("deltanet", 3e-3, 5, 0.1, 0.2, {0.9, 0.9, 0.5}));
  const std::string tables = smnist_tables(lines, "runs.jsonl");
  EXPECT_MENTIONS(tables, "| EFLA - DeltaNet | clean | +8.0 ± 13.1 (2/3) | - |");
  EXPECT_MENTIONS(tables, "| EFLA - DeltaNet | intensity | +20.0 ± 0.0 (3/3) | - |");
  EXPECT_MENTIONS(tables, "| EFLA - DeltaNet | noise | +0.0 ± 0.0 (0/3) | - |");
  EXPECT_EQ(tables.find("EFLA - RK-4"), std::string::npos);
  EXPECT_EQ(smnist_tables(sample(), "runs.jsonl").find("Differences"), std::string::npos);
}

TEST(SmnistReport, TheReleasedPairStandsApart) {
  const std::string tables = smnist_tables(sample(), "runs.jsonl");
  EXPECT_MENTIONS(tables, "| DeltaNet | 0.001 | 43 | 90.0 | 50.0 | 30.0 | 20.0 |");
  EXPECT_MENTIONS(tables, "| EFLA | 0.003 | 44 | 96.0 | 55.0 | 30.0 | 20.0 |");
  std::vector<nlohmann::json> without = sample();
  without.erase(without.begin());
  EXPECT_EQ(smnist_tables(without, "runs.jsonl").find("released"), std::string::npos);
}

TEST(SmnistReport, DrawsBands) {
  const TempFolder folder;
  const auto pictures = draw_smnist(folder.path(), sample(), "runs.jsonl");
  EXPECT_EQ(pictures,
            (std::vector<std::filesystem::path>{folder / "corruptions.png", folder / "rates.png"}));
  // EFLA at intensity 5: 70 +- 14.142.
  EXPECT_MENTIONS(slurp(folder / "corruptions.gp"), "\n5 70 55.857864");
  EXPECT_MENTIONS(slurp(folder / "rates.gp"), "set logscale x");
  EXPECT_TRUE(draw_smnist(folder.path(), {}, "runs.jsonl").empty());
}

TEST(SmnistReport, ALineThatIsNoRunIsNamed) {
  std::vector<nlohmann::json> lines = sample();
  lines[1].erase("clean");
  EXPECT_MENTIONS(error_of([&] { smnist_tables(lines, "runs.jsonl"); }),
                  "runs.jsonl line 2: no run");
  lines = sample();
  lines[2]["noise"] = {0.5};
  EXPECT_MENTIONS(error_of([&] { smnist_tables(lines, "runs.jsonl"); }),
                  "runs.jsonl line 3: 1 accuracies for 2 levels of noise");
}

}  // namespace
}  // namespace efla
