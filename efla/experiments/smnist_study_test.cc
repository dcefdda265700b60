#include "efla/experiments/smnist_study.h"

#include <torch/torch.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "efla/experiments/smnist_run.h"
#include "efla/experiments/test_images.h"
#include "efla/io/atomic_file.h"
#include "efla/io/metrics.h"

namespace efla {
namespace {

using testing::error_of;
using testing::slurp;
using testing::spit;
using testing::TempFolder;
using testing::write_images;

// Images of 4 x 4 pixels that any of the arms can learn, and runs of a few steps.
class SmnistStudy : public ::testing::Test {
 protected:
  SmnistStudy() {
    write_images(folder_.path(), 40, 25);
    images_ = read_image_data(folder_.path());
    options_.setting.batch = 16;
    options_.setting.steps = 5;
    options_.setting.width = 8;
    options_.setting.intensity = {1, 10};
    options_.setting.noise = {0, 1};
    options_.setting.dropout = {0, 0.5, 1};
    options_.runs = run_grid({"efla", "deltanet"}, {0.01}, {1, 2});
    options_.out = folder_ / "out";
  }

  std::vector<nlohmann::json> lines() const { return read_metrics(results_file(options_.out)); }

  // Lines without their times, by arm, rate and seed.
  std::set<std::string> results() const {
    std::set<std::string> results;
    for (nlohmann::json line : lines()) {
      line.erase("train_seconds");
      line.erase("test_seconds");
      results.insert(line.dump());
    }
    return results;
  }

  TempFolder folder_;
  ImageData images_;
  StudyOptions options_;
};

TEST_F(SmnistStudy, EveryRunIsALine) {
  const StudyResult result = run_study(options_, images_);
  EXPECT_EQ(result.finished, 4);
  EXPECT_EQ(result.skipped + result.left, 0);
  const std::vector<nlohmann::json> runs = lines();
  ASSERT_EQ(runs.size(), 4u);
  const nlohmann::json& run = runs[0];
  EXPECT_EQ(spec_of(run), (RunSpec{"efla", 0.01, 1}));
  EXPECT_EQ(run["setting"]["train_images"], 40);
  EXPECT_EQ(run["setting"]["side"], 4);
  EXPECT_EQ(run["setting"]["train_data"], images_.train.fingerprint);
  for (const char* suite : {"intensity", "noise", "dropout"}) {
    EXPECT_EQ(run[suite].size(), run["setting"][suite].size());
    EXPECT_EQ(run[suite][0], run["clean"]);
  }
  EXPECT_EQ(run["loss_curve"].size(), 5u);
  EXPECT_FALSE(run["diverged"]);
}

TEST_F(SmnistStudy, ASecondCallDoesOnlyWhatIsMissing) {
  run_study(options_, images_);
  const std::string before = slurp(results_file(options_.out));
  EXPECT_EQ(run_study(options_, images_).skipped, 4);
  EXPECT_EQ(slurp(results_file(options_.out)), before);
  // A line that a killed process half wrote is done again, and gives what it gave.
  const std::set<std::string> whole = results();
  spit(results_file(options_.out), before.substr(0, before.size() - 20));
  const StudyResult result = run_study(options_, images_);
  EXPECT_EQ(result.skipped, 3);
  EXPECT_EQ(result.finished, 1);
  EXPECT_EQ(results(), whole);
}

TEST_F(SmnistStudy, RunsAtOnceGiveWhatRunsInTurnGive) {
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  run_study(options_, images_);
  const std::set<std::string> serial = results();
  options_.out = folder_ / "parallel";
  options_.parallel_runs = 3;
  EXPECT_EQ(run_study(options_, images_).finished, 4);
  EXPECT_EQ(results(), serial);
  at::set_num_threads(threads);
}

TEST_F(SmnistStudy, AnotherSettingIsRefused) {
  run_study(options_, images_);
  options_.setting.steps = 6;
  EXPECT_MENTIONS(error_of([&] { run_study(options_, images_); }),
                  "line 1: a run of another setting (steps 5 there and 6 here)");
  options_.setting.steps = 5;
  images_.test.fingerprint = "00000000";
  EXPECT_MENTIONS(error_of([&] { run_study(options_, images_); }), "test_data");
}

TEST_F(SmnistStudy, ALineThatIsNoRunIsNamed) {
  make_folder(options_.out);
  spit(results_file(options_.out), "{\"step\": 3}\n");
  EXPECT_MENTIONS(error_of([&] { run_study(options_, images_); }), "line 1: no run of this study");
}

TEST_F(SmnistStudy, AFailingRunIsNamedAndTheOthersGoOn) {
  options_.runs.insert(options_.runs.begin(), {"no such arm", 0.01, 1});
  const StudyResult result = run_study(options_, images_);
  EXPECT_EQ(result.finished, 4);
  ASSERT_EQ(result.failures.size(), 1u);
  EXPECT_MENTIONS(result.failures[0], "no such arm, learning rate 0.01, seed 1: 'no such arm' is");
}

TEST_F(SmnistStudy, TheTimeLimitLeavesRunsForTheNextCall) {
  options_.time_limit = 1e-9;
  const StudyResult result = run_study(options_, images_);
  EXPECT_EQ(result.left, 4);
  EXPECT_EQ(result.finished, 0);
  options_.time_limit = 0;
  EXPECT_EQ(run_study(options_, images_).finished, 4);
}

TEST_F(SmnistStudy, ADivergedRunSaysSoAndItsImagesCountAsWrong) {
  options_.runs = {{"euler_raw", 1e6, 1}};
  run_study(options_, images_);
  EXPECT_TRUE(lines()[0]["diverged"]);
  EXPECT_TRUE(lines()[0]["final_loss"].is_null());
  EXPECT_EQ(lines()[0]["clean"], 0);
}

TEST_F(SmnistStudy, ItLearns) {
  options_.setting.steps = 60;
  options_.runs = {{"efla", 0.01, 1}};
  for (const int64_t layers : {1, 2}) {
    options_.setting.layers = layers;
    options_.out = folder_ / std::to_string(layers);
    run_study(options_, images_);
    EXPECT_GT(lines()[0]["clean"], 0.9) << layers;
    EXPECT_LT(lines()[0]["final_loss"], 0.3) << layers;
  }
}

TEST(SmnistOrder, EveryEpochHasEveryImageOnceAndAShortLastBatch) {
  SmnistSetting setting;
  setting.batch = 4;
  setting.steps = 6;  // two epochs of ten images: 4 + 4 + 2
  const std::vector<int64_t> order = data_order(setting, 10, 7);
  ASSERT_EQ(order.size(), 24u);
  std::vector<int64_t> epochs[2];
  for (size_t i = 0; i < 24; ++i) {
    EXPECT_EQ(order[i] == -1, i % 12 >= 10);
    if (order[i] >= 0) epochs[i / 12].push_back(order[i]);
  }
  EXPECT_NE(epochs[0], epochs[1]);
  for (auto& epoch : epochs) {
    std::sort(epoch.begin(), epoch.end());
    EXPECT_EQ(epoch, (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  }
  EXPECT_NE(data_order(setting, 10, 8), order);
  setting.layers = 3;
  EXPECT_EQ(data_order(setting, 10, 7), order);
}

// The last, short batch counts its images alone: the same loss as a batch of that size.
TEST_F(SmnistStudy, AShortBatchIsTheMeanOverItsImages) {
  const RunData data(images_, at::kCPU);
  SmnistSetting setting = options_.setting;
  setting.side = 4;
  setting.batch = 64;
  setting.steps = 1;
  TrainingRun padded({"efla", 0.01, 3}, setting, data);
  padded.step();
  setting.batch = 40;
  TrainingRun full({"efla", 0.01, 3}, setting, data);
  full.step();
  EXPECT_NEAR(padded.losses()[0], full.losses()[0], 1e-5);
}

TEST_F(SmnistStudy, CorruptionsAreSeededAndDoTheirArithmetic) {
  const RunData data(images_, at::kCPU), again(images_, at::kCPU);
  EXPECT_TRUE(torch::equal(data.normal, again.normal));
  EXPECT_TRUE(torch::equal(data.uniform, again.uniform));
  EXPECT_NEAR(data.normal.mean().item<double>(), 0, 0.2);
  EXPECT_NEAR(data.normal.std().item<double>(), 1, 0.2);
  const int64_t first = 5, count = 3, pixels = 16;
  for (const auto& [corruption, level] : std::vector<std::pair<Corruption, double>>{
           {Corruption::kIntensity, 7}, {Corruption::kNoise, 0.5}, {Corruption::kDropout, 0.3}}) {
    const at::Tensor images = corrupted_images(data, corruption, level, first, count);
    int64_t dropped = 0;
    for (int64_t i = 0; i < count * pixels; ++i) {
      const int64_t at = first * pixels + i;
      const double clean = images_.test.pixels[static_cast<size_t>(at)] / 255.0;
      const double z = data.normal.flatten()[at].item<double>();
      const double u = data.uniform.flatten()[at].item<double>();
      const double expected = corruption == Corruption::kIntensity ? 7 * clean
                              : corruption == Corruption::kNoise   ? clean + 0.5 * z
                              : u < 0.3                            ? 0
                                                                   : clean;
      EXPECT_NEAR(images.flatten()[i].item<double>(), expected, 1e-6);
      dropped += u < 0.3 ? 1 : 0;
    }
    EXPECT_NEAR(static_cast<double>(dropped) / (count * pixels), 0.3, 0.25);
  }
  EXPECT_EQ(corrupted_images(data, Corruption::kDropout, 1, 0, 25).count_nonzero().item<int>(), 0);
}

TEST(SmnistGrid, GoesArmByArmWithinRateAndSeed) {
  const std::vector<RunSpec> grid = run_grid({"a", "b"}, {0.1, 0.2}, {5, 6});
  ASSERT_EQ(grid.size(), 8u);
  EXPECT_EQ(grid[0], (RunSpec{"a", 0.1, 5}));
  EXPECT_EQ(grid[1], (RunSpec{"b", 0.1, 5}));
  EXPECT_EQ(grid[2], (RunSpec{"a", 0.2, 5}));
  EXPECT_EQ(grid[7], (RunSpec{"b", 0.2, 6}));
  EXPECT_EQ(released_runs(), (std::vector<RunSpec>{{"deltanet", 1e-3, 43}, {"efla", 3e-3, 44}}));
}

}  // namespace
}  // namespace efla
