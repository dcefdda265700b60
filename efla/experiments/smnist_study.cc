#include "efla/experiments/smnist_study.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <limits>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "efla/experiments/smnist_run.h"
#include "efla/io/atomic_file.h"
#include "efla/io/error.h"
#include "efla/io/log.h"
#include "efla/io/metrics.h"
#include "efla/io/progress.h"
#include "efla/train/stop_signal.h"

namespace efla {
namespace {

constexpr auto kRedraw = std::chrono::milliseconds(200);

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// The first entry in which two settings differ.
std::string difference(const nlohmann::json& theirs, const nlohmann::json& ours) {
  for (const auto& [key, value] : ours.items()) {
    if (!theirs.contains(key) || theirs[key] != value) {
      return fmt::format("{} {} there and {} here", key,
                         theirs.contains(key) ? theirs[key].dump() : "missing", value.dump());
    }
  }
  return "another version of this program";
}

// The runs in the file. All must be of `setting`: a table over two settings would compare what
// cannot be compared.
std::vector<RunSpec> runs_in(const std::filesystem::path& file, const SmnistSetting& setting) {
  std::vector<RunSpec> runs;
  if (!path_exists(file)) return runs;
  const nlohmann::json ours = setting.to_json();
  int64_t number = 0;
  for (const nlohmann::json& line : read_metrics(file)) {
    ++number;
    try {
      if (line.at("setting") != ours) {
        throw UsageError(
            fmt::format("{} line {}: a run of another setting ({}); give another folder with --out",
                        file.string(), number, difference(line.at("setting"), ours)));
      }
      runs.push_back(spec_of(line));
    } catch (const nlohmann::json::exception& error) {
      throw Error(
          fmt::format("{} line {}: no run of this study ({}); remove the line, or give "
                      "another folder with --out",
                      file.string(), number, error.what()));
    }
  }
  return runs;
}

class Study {
 public:
  Study(const StudyOptions& options, const ImageData& images)
      : options_(options),
        lock_(options.out / ".lock"),
        device_(options.cuda ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU)) {
    const std::filesystem::path file = results_file(options_.out);
    const std::vector<RunSpec> done = runs_in(file, options_.setting);
    for (const RunSpec& run : options_.runs) {
      if (std::find(done.begin(), done.end(), run) == done.end()) {
        queue_.push_back(run);
      } else {
        ++result_.skipped;
      }
    }
    if (queue_.empty()) return;
    make_step_runner(device_, options_.graphs);  // says at once when there is no such device
    log_ = std::make_unique<MetricsLog>(file, std::numeric_limits<int64_t>::max());
    data_ = std::make_unique<RunData>(images, device_);
  }

  StudyResult run() {
    if (queue_.empty()) return result_;
    const StopSignal signals;
    const auto threads =
        static_cast<size_t>(std::min(options_.parallel_runs, static_cast<int64_t>(queue_.size())));
    running_ = threads;
    std::vector<std::thread> workers;
    workers.reserve(threads);
    for (size_t i = 0; i < threads; ++i) workers.emplace_back([this, threads] { work(threads); });
    watch();
    for (std::thread& worker : workers) worker.join();
    result_.left = static_cast<int64_t>(queue_.size()) - result_.finished -
                   static_cast<int64_t>(result_.failures.size());
    result_.signal = StopSignal::received();
    return result_;
  }

 private:
  // Draws the progress until no worker is left.
  void watch() {
    Progress progress("steps", static_cast<int64_t>(queue_.size()) * options_.setting.steps);
    std::unique_lock<std::mutex> lock(mutex_);
    while (running_ > 0) {
      changed_.wait_for(lock, kRedraw);
      const std::string text = fmt::format("{} of {} runs", result_.finished, queue_.size());
      progress.update(steps_.load(), text);
    }
    progress.finish();
  }

  bool time_is_up() const {
    return options_.time_limit > 0 &&
           std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count() >
               options_.time_limit;
  }

  // The next run; none when the queue is empty or the study has to end.
  const RunSpec* next_run() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (next_ == queue_.size() || StopSignal::received() != nullptr || time_is_up()) return nullptr;
    return &queue_[next_++];
  }

  void work(size_t threads) {
    // Runs beside each other share the cores; a run alone has them all.
    if (!options_.cuda && threads > 1) at::set_num_threads(1);
    try {
      const std::unique_ptr<StepRunner> runner = make_step_runner(device_, options_.graphs);
      while (const RunSpec* spec = next_run()) execute(*spec, *runner);
    } catch (const std::exception& error) {
      log_warning(first_line(error.what()));
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    --running_;
    changed_.notify_all();
  }

  void execute(const RunSpec& spec, StepRunner& runner) {
    try {
      const auto go_on = [this](int64_t steps) {
        steps_ += steps;
        return StopSignal::received() == nullptr;
      };
      const nlohmann::ordered_json line =
          execute_run(spec, options_.setting, *data_, runner, go_on);
      if (line.is_null()) return;
      const std::lock_guard<std::mutex> lock(mutex_);
      log_->write(line);
      ++result_.finished;
    } catch (const std::exception& error) {
      const std::lock_guard<std::mutex> lock(mutex_);
      result_.failures.push_back(spec.text() + ": " + first_line(error.what()));
    }
    changed_.notify_all();
  }

  StudyOptions options_;
  FileLock lock_;
  at::Device device_;
  std::vector<RunSpec> queue_;
  std::unique_ptr<MetricsLog> log_;
  std::unique_ptr<RunData> data_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  size_t next_ = 0, running_ = 0;
  StudyResult result_;
  std::atomic<int64_t> steps_{0};
};

}  // namespace

StudyResult run_study(StudyOptions options, const ImageData& images) {
  make_folder(options.out);
  options.setting.train_data = images.train.fingerprint;
  options.setting.test_data = images.test.fingerprint;
  options.setting.train_images = images.train.count();
  options.setting.test_images = images.test.count();
  options.setting.side = images.train.side;
  const int threads = at::get_num_threads();
  const StudyResult result = Study(options, images).run();
  if (at::get_num_threads() != threads) at::set_num_threads(threads);
  return result;
}

}  // namespace efla
