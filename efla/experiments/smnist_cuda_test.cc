// The study on a GPU: captured steps against plain ones and against the CPU, several runs at once.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "efla/experiments/arms.h"
#include "efla/experiments/smnist_study.h"
#include "efla/experiments/step_runner.h"
#include "efla/experiments/test_images.h"
#include "efla/io/metrics.h"

namespace efla {
namespace {

using testing::TempFolder;

class StudyOnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_usable()) GTEST_SKIP() << "no CUDA device here";
    testing::write_images(folder_.path(), 60, 25);
    images_ = read_image_data(folder_.path());
    options_.setting.batch = 16;  // the last of an epoch is short
    options_.setting.steps = 12;
    options_.setting.intensity = {1, 3};
    options_.setting.noise = options_.setting.dropout = {0, 0.5};
    std::vector<std::string> arms;
    for (const Arm& arm : all_arms()) arms.emplace_back(arm.name);
    options_.runs = run_grid(arms, {0.003}, {1, 2});
    options_.cuda = true;
  }

  // Loss curves by run.
  std::map<std::string, std::vector<double>> curves(const std::string& out) {
    options_.out = folder_ / out;
    const StudyResult result = run_study(options_, images_);
    EXPECT_EQ(result.finished, static_cast<int64_t>(options_.runs.size()));
    for (const std::string& failure : result.failures) ADD_FAILURE() << failure;
    std::map<std::string, std::vector<double>> curves;
    for (const nlohmann::json& line : read_metrics(results_file(options_.out))) {
      curves[spec_of(line).text()] = line.at("loss_curve").get<std::vector<double>>();
    }
    return curves;
  }

  TempFolder folder_;
  ImageData images_;
  StudyOptions options_;
};

TEST_F(StudyOnGpu, GraphsOnManyStreamsGiveWhatPlainStepsAndTheCpuGive) {
  options_.parallel_runs = 4;
  const auto graphs = curves("graphs");
  options_.parallel_runs = 1;
  options_.graphs = false;
  const auto plain = curves("plain");
  options_.cuda = false;
  const auto cpu = curves("cpu");
  ASSERT_EQ(graphs.size(), options_.runs.size());
  for (const auto& [run, curve] : graphs) {
    ASSERT_EQ(curve.size(), plain.at(run).size());
    for (size_t i = 0; i < curve.size(); ++i) {
      EXPECT_NEAR(curve[i], plain.at(run)[i], 1e-4) << run << " step " << i;
      EXPECT_NEAR(curve[i], cpu.at(run)[i], 2e-3) << run << " step " << i;
    }
  }
}

}  // namespace
}  // namespace efla
