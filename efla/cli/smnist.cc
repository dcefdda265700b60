// efla smnist: the sequential-image study.
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "efla/cli/commands.h"
#include "efla/cli/common.h"
#include "efla/cli/measure.h"
#include "efla/experiments/arms.h"
#include "efla/experiments/image_data.h"
#include "efla/experiments/smnist_report.h"
#include "efla/experiments/smnist_study.h"
#include "efla/experiments/step_runner.h"
#include "efla/io/atomic_file.h"
#include "efla/io/error.h"
#include "efla/io/metrics.h"

namespace efla::cli {
namespace {

constexpr uint64_t kPermutationSeed = 92;  // one permutation for all runs

struct Arguments {
  std::string data = kFashionMnist;
  std::string out = "runs/smnist";
  std::vector<std::string> arms = arm_names();
  std::vector<double> rates = {1e-4, 3e-4, 1e-3, 3e-3, 1e-2};
  int64_t seeds = 5;
  uint64_t first_seed = 42;
  int64_t epochs = 1, steps = 0;
  int64_t train_images = 0, test_images = 0, shrink = 1;
  SmnistSetting setting;
  bool released = false, quick = false, report_only = false, no_graphs = false;
  std::string device = "auto";
  int64_t parallel_runs = 0;
  double time_limit = 0;
};

// What --quick means for options that were not given.
void apply_quick(const CLI::App& command, Arguments& a) {
  const auto set = [&](const char* name, auto& value, const auto& quick) {
    if (command.count(name) == 0) value = quick;
  };
  set("--arms", a.arms, std::vector<std::string>{"efla"});
  set("--learning-rates", a.rates, std::vector<double>{3e-3});
  set("--seeds", a.seeds, 2);
  set("--shrink", a.shrink, 2);
  if (command.count("--epochs") == 0) set("--steps", a.steps, 200);
  set("--test-images", a.test_images, 1000);
  a.setting.intensity = {1, 2, 4, 6, 8, 10};
  a.setting.noise = a.setting.dropout = {0, .2, .4, .6, .8, 1};
}

ImageData prepare_images(const Arguments& a) {
  ImageData data = read_image_data(a.data);
  data.train = first_images(data.train, a.train_images);
  data.test = first_images(data.test, a.test_images);
  for (ImageSet* set : {&data.train, &data.test}) {
    if (a.shrink > 1) *set = shrink(*set, a.shrink);
    if (a.setting.permuted) *set = permute_pixels(*set, kPermutationSeed);
  }
  return data;
}

StudyOptions study_options(const Arguments& a, const ImageData& images) {
  StudyOptions options;
  for (const std::string& arm : a.arms) arm_named(arm);  // an unknown one is said now
  std::vector<uint64_t> seeds(static_cast<size_t>(a.seeds));
  std::iota(seeds.begin(), seeds.end(), a.first_seed);
  options.runs = a.released ? released_runs() : run_grid(a.arms, a.rates, seeds);
  options.setting = a.setting;
  if (a.setting.width % a.setting.heads != 0) {
    throw UsageError(fmt::format("--heads {} does not divide --width {}; give a divisor",
                                 a.setting.heads, a.setting.width));
  }
  const int64_t per_epoch = (images.train.count() + a.setting.batch - 1) / a.setting.batch;
  options.setting.steps = a.steps > 0 ? a.steps : a.epochs * per_epoch;
  options.out = a.out;
  options.cuda = a.device == "cuda" || (a.device == "auto" && cuda_usable());
  options.graphs = !a.no_graphs;
  options.parallel_runs = a.parallel_runs > 0 ? a.parallel_runs : options.cuda ? 8 : 1;
  options.time_limit = a.time_limit;
  return options;
}

// Tables on standard output and in tables.md, pictures beside them.
void report(const std::string& out) {
  const std::string file = results_file(out).string();
  const std::vector<nlohmann::json> lines = read_metrics(file);
  const std::string tables = smnist_tables(lines, file);
  if (tables.empty()) return;
  write_file_atomically(std::filesystem::path(out) / "tables.md", tables);
  print_text(tables);
  print_text(
      fmt::format("runs      {} ({} in all)\ntables    {}/tables.md\n", file, lines.size(), out));
  for (const std::filesystem::path& picture : draw_smnist(out, lines, file)) {
    print_text(fmt::format("picture   {}\n", picture.string()));
  }
}

void run(const CLI::App& command, Arguments a) {
  if (a.report_only) {
    report(a.out);
    return;
  }
  if (a.quick) apply_quick(command, a);
  const ImageData images = prepare_images(a);
  const StudyOptions options = study_options(a, images);
  if (!options.cuda) bench::tune_malloc();  // a step's large tensors keep their pages
  const StudyResult result = run_study(options, images);
  if (result.finished + result.skipped > 0) report(a.out);
  if (!result.failures.empty()) {
    throw Error(fmt::format("{} of {} runs failed, the first {}; the others are in {}",
                            result.failures.size(), options.runs.size(), result.failures.front(),
                            results_file(a.out).string()));
  }
  if (result.left > 0) {
    const std::string why = result.signal != nullptr ? result.signal : "--time-limit";
    const std::string what =
        fmt::format("{} of {} runs are left because of {}; the same command does them", result.left,
                    options.runs.size(), why);
    throw Error(what);
  }
}

void add_what_runs(CLI::App* command, Arguments& a) {
  const CLI::Range positive(int64_t{1}, int64_t{1} << 40);
  command->add_option("--arms", a.arms, "Arms to compare; --list-arms names them")
      ->delimiter(',')
      ->type_name("ARM,...");
  command->add_flag_callback(
      "--list-arms",
      [] {
        for (const Arm& arm : all_arms())
          print_text(fmt::format("{:<16} {}\n", arm.name, arm.title));
        throw CLI::Success();
      },
      "Print the arms and stop");
  command->add_option("--learning-rates", a.rates, "Learning rates, the same for every arm")
      ->delimiter(',')
      ->check(CLI::Range(1e-12, 1e3))
      ->capture_default_str()
      ->type_name("RATE,...");
  command->add_option("--seeds", a.seeds, "Number of seeds, the same for every arm")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--first-seed", a.first_seed, "The first of them")
      ->capture_default_str()
      ->type_name("N");
  command->add_flag("--released", a.released,
                    "Only the released script's unequal pair: DeltaNet at 1e-3 with seed 43, EFLA "
                    "at 3e-3 with seed 44");
  command->add_flag("--quick", a.quick,
                    "For a CPU, minutes: unless given otherwise one arm, one rate, two seeds, 200 "
                    "steps, images of half the side, 1,000 test images and fewer levels");
  command->add_option("--epochs", a.epochs, "Epochs of training")
      ->check(positive)
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--steps", a.steps, "Steps of training instead of epochs")
      ->check(positive)
      ->type_name("N");
}

void add_model_and_data(CLI::App* command, Arguments& a) {
  const auto number = [&](const char* name, int64_t& value, const char* what, int64_t most) {
    return command->add_option(name, value, what)
        ->check(CLI::Range(int64_t{1}, most))
        ->type_name("N");
  };
  command->add_option("--data", a.data, "Folder with MNIST's four IDX files, plain or .gz")
      ->capture_default_str()
      ->type_name("DIR");
  number("--layers", a.setting.layers, "1: the released model; more: residual blocks with an MLP",
         64)
      ->capture_default_str();
  number("--width", a.setting.width, "Width of the model", 512)->capture_default_str();
  number("--heads", a.setting.heads, "Heads of each recurrence", 64)->capture_default_str();
  number("--batch", a.setting.batch, "Images of a step", 65536)->capture_default_str();
  command->add_flag("--permuted", a.setting.permuted, "Pixels in one random order");
  number("--shrink", a.shrink, "Shrink images N times per side by averaging", 28);
  number("--train-images", a.train_images, "Only the first N training images", 1 << 30);
  number("--test-images", a.test_images, "Only the first N test images", 1 << 30);
}

}  // namespace

void add_smnist(CLI::App& app) {
  const auto a = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand(
      "smnist", "Images pixel by pixel: EFLA, DeltaNet and others under equal conditions");
  add_what_runs(command, *a);
  add_model_and_data(command, *a);
  command->add_option("--device", a->device, "Where to run")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command
      ->add_option("--parallel-runs", a->parallel_runs,
                   "Runs at once (default: 8 on a GPU, each a CUDA graph on its own stream; 1 on a "
                   "CPU, where each takes one thread)")
      ->check(CLI::Range(1, 32))
      ->type_name("N");
  command->add_flag("--no-cuda-graphs", a->no_graphs, "Launch every kernel of every step");
  command->add_option("--time-limit", a->time_limit, "Start no run after so many seconds")
      ->check(CLI::PositiveNumber)
      ->type_name("SECONDS");
  command->add_option("--out", a->out, "Folder of runs.jsonl, tables and pictures")
      ->capture_default_str()
      ->type_name("DIR");
  command->add_flag("--report-only", a->report_only, "Tables and pictures of the runs in --out");
  command->footer(
      "Every run is a line of DIR/runs.jsonl; runs that are there already are not done again, so "
      "a\n"
      "study that was stopped goes on with the same command. All arms see the same batches and\n"
      "start from the same values.\n\n"
      "Example:\n"
      "  efla smnist --quick --arms efla,deltanet --data mnist --out runs/quick");
  command->callback([a, command] { run(*command, *a); });
}

}  // namespace efla::cli
