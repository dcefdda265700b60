// One training run of the sequential-image study and the measurement of what it learned.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "efla/experiments/arms.h"
#include "efla/experiments/capturable_adamw.h"
#include "efla/experiments/image_data.h"
#include "efla/experiments/sequence_classifier.h"
#include "efla/experiments/smnist_setting.h"
#include "efla/experiments/step_runner.h"

namespace efla {

/// The images on the device, shared by all runs, with the noise that corrupts the test images: one
/// normal and one uniform number per pixel, the same for every level, arm and run.
struct RunData {
  RunData(const ImageData& images, at::Device device);

  at::Tensor train_pixels;     // [N, T] uint8
  at::Tensor train_labels;     // [N] int64
  at::Tensor test_pixels;      // [M, T] float in [0, 1]
  at::Tensor test_labels;      // [M] int64
  at::Tensor normal, uniform;  // [M, T] float
};

enum class Corruption {
  kIntensity,  // pixels times the level; 1 changes nothing
  kNoise,      // plus normal noise of this standard deviation, not clamped; 0
  kDropout,    // each pixel zero with this probability, the others as they are; 0
};

/// Test images first ... first + count - 1, corrupted: [count, T] float.
at::Tensor corrupted_images(const RunData& data, Corruption corruption, double level, int64_t first,
                            int64_t count);

/// Rows of each step's batch, [steps, batch], -1 where the last batch of an epoch is short. Depends
/// on the seed alone, so every arm sees the same order.
std::vector<int64_t> data_order(const SmnistSetting& setting, int64_t images, uint64_t seed);

class TrainingRun {
 public:
  TrainingRun(const RunSpec& spec, const SmnistSetting& setting, const RunData& data);

  /// One training step. Which batch it takes stands in the device's memory: nothing comes from the
  /// host or goes to it, so that a CUDA graph of one step serves for all.
  void step();

  /// Loss of every step; NaN for those not taken.
  std::vector<float> losses() const;

  /// Share of the corrupted test images that the model classifies rightly; a logit that is not
  /// finite makes an image wrong.
  double accuracy(Corruption corruption, double level) const;

 private:
  const RunData& data_;
  int64_t test_batch_;
  SequenceClassifier model_;
  CapturableAdamW optimizer_;
  at::Tensor order_;   // [steps, batch] int64
  at::Tensor step_;    // [1] int64: the next step
  at::Tensor losses_;  // [steps] float
};

/// Trains and measures; the line of the results file. Returns null when `go_on`, called with the
/// number of steps taken since the last call, was false before the end.
nlohmann::ordered_json execute_run(const RunSpec& spec, const SmnistSetting& setting,
                                   const RunData& data, StepRunner& runner,
                                   const std::function<bool(int64_t)>& go_on);

}  // namespace efla
