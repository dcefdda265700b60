#include "efla/experiments/smnist_run.h"

#include <ATen/CPUGeneratorImpl.h>

#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "efla/io/random.h"

namespace efla {
namespace {

constexpr uint64_t kCorruptionSeed = 42;  // the script's
constexpr int64_t kIgnored = -100;        // the label of a row that is not there
constexpr int64_t kTestBatchCpu = 125, kTestBatchCuda = 1000;
constexpr int64_t kLossCurvePoints = 20;

at::Tensor bytes_on(const std::vector<uint8_t>& values, at::IntArrayRef sizes, at::Device device) {
  return at::from_blob(const_cast<uint8_t*>(values.data()), sizes, at::kByte).clone().to(device);
}

ClassifierShape shape_of(const SmnistSetting& s) {
  return {s.side * s.side, s.width, s.heads, s.layers, kImageClasses};
}

CapturableAdamW::Options optimizer_options(double learning_rate) {
  CapturableAdamW::Options options;
  options.learning_rate = learning_rate;
  return options;
}

double mean(const float* begin, const float* end) {
  return std::accumulate(begin, end, 0.0) / static_cast<double>(end - begin);
}

// Means over about twenty pieces of equal length.
std::vector<double> loss_curve(const std::vector<float>& losses) {
  const auto steps = static_cast<int64_t>(losses.size());
  const int64_t points = std::min(kLossCurvePoints, steps);
  std::vector<double> curve;
  curve.reserve(static_cast<size_t>(points));
  for (int64_t i = 0; i < points; ++i) {
    curve.push_back(
        mean(losses.data() + i * steps / points, losses.data() + (i + 1) * steps / points));
  }
  return curve;
}

void measure(const TrainingRun& run, const SmnistSetting& setting, nlohmann::ordered_json& line) {
  const double clean = run.accuracy(Corruption::kIntensity, 1);
  line["clean"] = clean;
  const auto suite = [&](const char* name, Corruption corruption, double neutral,
                         const std::vector<double>& levels) {
    std::vector<double> accuracies;
    accuracies.reserve(levels.size());
    for (const double level : levels) {
      accuracies.push_back(level == neutral ? clean : run.accuracy(corruption, level));
    }
    line[name] = accuracies;
  };
  suite("intensity", Corruption::kIntensity, 1, setting.intensity);
  suite("noise", Corruption::kNoise, 0, setting.noise);
  suite("dropout", Corruption::kDropout, 0, setting.dropout);
}

}  // namespace

RunData::RunData(const ImageData& images, at::Device device) {
  const auto place = [&](const ImageSet& set, at::Tensor& pixels, at::Tensor& labels) {
    pixels = bytes_on(set.pixels, {set.count(), set.length()}, device);
    labels = bytes_on(set.labels, {set.count()}, device).to(at::kLong);
  };
  place(images.train, train_pixels, train_labels);
  place(images.test, test_pixels, test_labels);
  test_pixels = test_pixels.to(at::kFloat) / 255;
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(kCorruptionSeed);
  const at::Tensor like = at::empty(test_pixels.sizes(), at::kFloat);
  normal = like.clone().normal_(0, 1, random).to(device);
  uniform = like.clone().uniform_(0, 1, random).to(device);
  wait_for(device);  // other streams read it
}

at::Tensor corrupted_images(const RunData& data, Corruption corruption, double level, int64_t first,
                            int64_t count) {
  at::Tensor pixels = data.test_pixels.narrow(0, first, count);
  switch (corruption) {
    case Corruption::kIntensity:
      return pixels * level;
    case Corruption::kNoise:
      return pixels + level * data.normal.narrow(0, first, count);
    case Corruption::kDropout:
      return pixels * (data.uniform.narrow(0, first, count) >= level);
  }
  return pixels;
}

std::vector<int64_t> data_order(const SmnistSetting& setting, int64_t images, uint64_t seed) {
  SplitMix64 random(seed);
  std::vector<int64_t> epoch(static_cast<size_t>(images)), order;
  std::iota(epoch.begin(), epoch.end(), 0);
  const auto wanted = static_cast<size_t>(setting.steps * setting.batch);
  while (order.size() < wanted) {
    shuffle(epoch, random);
    order.insert(order.end(), epoch.begin(), epoch.end());
    while (order.size() % static_cast<size_t>(setting.batch) != 0) order.push_back(-1);
  }
  order.resize(wanted);
  return order;
}

TrainingRun::TrainingRun(const RunSpec& spec, const SmnistSetting& setting, const RunData& data)
    : data_(data),
      test_batch_(data.test_pixels.is_cuda() ? kTestBatchCuda : kTestBatchCpu),
      model_(arm_named(spec.arm), shape_of(setting), spec.seed,
             data.test_pixels.options().dtype(at::kFloat)),
      optimizer_(model_.parameters(), optimizer_options(spec.learning_rate)) {
  const at::Device device = data.test_pixels.device();
  const std::vector<int64_t> order = data_order(setting, data.train_labels.size(0), spec.seed);
  order_ = at::tensor(order).view({setting.steps, setting.batch}).to(device);
  step_ = at::zeros({1}, at::device(device).dtype(at::kLong));
  losses_ = at::full({setting.steps}, NAN, at::device(device).dtype(at::kFloat));
}

void TrainingRun::step() {
  const at::Tensor rows = order_.index_select(0, step_).squeeze(0);
  const at::Tensor there = at::clamp_min(rows, 0);
  const at::Tensor pixels = data_.train_pixels.index_select(0, there).to(at::kFloat) / 255;
  const at::Tensor labels =
      data_.train_labels.index_select(0, there).masked_fill(rows < 0, kIgnored);
  const at::Tensor loss =
      at::cross_entropy_loss(model_.forward(pixels), labels, {}, at::Reduction::Mean, kIgnored);
  optimizer_.step(torch::autograd::grad({loss}, model_.parameters()));
  const torch::NoGradGuard no_grad;
  losses_.index_copy_(0, step_, loss.detach().view({1}));
  step_.add_(1);
}

std::vector<float> TrainingRun::losses() const {
  const at::Tensor losses = losses_.cpu();
  return {losses.const_data_ptr<float>(), losses.const_data_ptr<float>() + losses.numel()};
}

double TrainingRun::accuracy(Corruption corruption, double level) const {
  const torch::NoGradGuard no_grad;
  at::Tensor right = at::zeros({}, data_.test_labels.options());
  const int64_t images = data_.test_labels.size(0);
  for (int64_t first = 0; first < images; first += test_batch_) {
    const int64_t count = std::min(test_batch_, images - first);
    const at::Tensor logits =
        model_.forward(corrupted_images(data_, corruption, level, first, count));
    const at::Tensor finite = at::isfinite(logits).all(-1);
    const at::Tensor labels = data_.test_labels.narrow(0, first, count);
    right += (finite & (logits.argmax(-1) == labels)).sum();
  }
  return static_cast<double>(right.item<int64_t>()) / static_cast<double>(images);
}

nlohmann::ordered_json execute_run(const RunSpec& spec, const SmnistSetting& setting,
                                   const RunData& data, StepRunner& runner,
                                   const std::function<bool(int64_t)>& go_on) {
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  TrainingRun run(spec, setting, data);
  bool stopped = false;
  int64_t reported = 0;
  runner.run([&] { run.step(); }, setting.steps,
             [&](int64_t done) {
               stopped = !go_on(done - reported);
               reported = done;
               return !stopped;
             });
  if (stopped) return nullptr;
  const double trained = seconds();
  const std::vector<float> losses = run.losses();
  const auto tenth = static_cast<std::ptrdiff_t>(losses.size() - losses.size() / 10);
  const double final_loss = losses.size() < 10
                                ? losses.back()
                                : mean(losses.data() + tenth, losses.data() + losses.size());
  nlohmann::ordered_json line = {{"arm", spec.arm},
                                 {"learning_rate", spec.learning_rate},
                                 {"seed", spec.seed},
                                 {"final_loss", final_loss},
                                 {"diverged", !std::isfinite(final_loss)}};
  measure(run, setting, line);
  line["loss_curve"] = loss_curve(losses);
  line["train_seconds"] = std::round(trained * 1000) / 1000;
  line["test_seconds"] = std::round((seconds() - trained) * 1000) / 1000;
  line["device"] = data.test_pixels.is_cuda() ? "cuda" : "cpu";
  line["setting"] = setting.to_json();
  return line;
}

}  // namespace efla
