#include "efla/cli/eval_tasks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>

#include "efla/cli/common.h"
#include "efla/io/atomic_file.h"
#include "efla/io/checksum.h"
#include "efla/io/documents.h"
#include "efla/io/error.h"
#include "efla/io/log.h"
#include "efla/io/progress.h"
#include "efla/nn/pretrained.h"

namespace efla::cli {
namespace {

namespace fs = std::filesystem;

const std::string kPasskey = "passkey";

std::vector<std::string> task_names() {
  std::vector<std::string> names;
  for (const TaskSpec& spec : task_specs()) names.push_back(spec.name);
  return names;
}

// The tasks meant by --tasks: names, and the words "all" and "available".
std::vector<std::string> chosen_tasks(const std::vector<std::string>& given,
                                      const std::vector<std::string>& folders) {
  std::vector<std::string> chosen;
  const auto add = [&chosen](const std::string& name) {
    if (std::find(chosen.begin(), chosen.end(), name) == chosen.end()) chosen.push_back(name);
  };
  for (const std::string& name : given) {
    if (name == "all") {
      for (const std::string& task : task_names()) add(task);
    } else if (name == "available") {
      for (const TaskSpec& spec : task_specs()) {
        if (!find_task_file(spec.files, folders).empty()) add(spec.name);
      }
      if (chosen.empty()) {
        throw Error(
            fmt::format("{} holds no file of any task; see docs/evaluation.md for their "
                        "names",
                        fmt::join(folders, ", ")));
      }
    } else {
      if (name != kPasskey) task_spec(name);
      add(name);
    }
  }
  return chosen;
}

// Everything that decides a sample's outcome, beside the sample.
nlohmann::ordered_json identity(const TaskArguments& arguments, const TaskModel& model) {
  std::string weights;
  for (const fs::path& path : folder_entries(model.folder)) {
    if (path.extension() != ".safetensors" || path.stem() == "optimizer") continue;
    const FileChecksum checksum = checksum_file(path);
    weights +=
        fmt::format("{}:{}:{:08x};", path.filename().string(), checksum.bytes, checksum.crc32);
  }
  weights += model.model->config().to_json().dump();
  const PromptOptions& prompt = arguments.options.prompt;
  return {{"model", fnv1a_hex(weights)},
          {"tokenizer", model.tokenizer.fingerprint()},
          {"dtype", dtype_name(model.model->dtype())},
          {"device", model.model->head_weight().is_cuda() ? "cuda" : "cpu"},
          {"shots", prompt.shots},
          {"shot_seed", prompt.shot_seed},
          {"bos", arguments.bos},
          {"window", prompt.max_length},
          {"separate_contexts", arguments.separate_contexts}};
}

// The folder of a run's output; a stopped run of the same evaluation goes on in it.
class OutputFolder {
 public:
  OutputFolder(const std::string& path, const nlohmann::ordered_json& identity)
      : path_(path), identity_(identity) {
    make_folder(path_);
    lock_ = std::make_unique<FileLock>(path_ / "eval.lock");
    const fs::path record = path_ / "evaluation.json";
    if (path_exists(record)) {
      check(nlohmann::ordered_json::parse(read_file(record), nullptr, false));
    } else {
      write_file_atomically(record, identity_.dump(2) + "\n");
    }
  }

  void write(const std::vector<TaskResult>& results, const std::string& model) const {
    nlohmann::ordered_json object = {{"model", model}, {"evaluation", identity_}};
    object["results"] = nlohmann::ordered_json::array();
    for (const TaskResult& result : results) object["results"].push_back(to_json(result));
    write_file_atomically(
        path_ / "results.json",
        object.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
    write_file_atomically(path_ / "results.md", markdown_table(results));
  }

 private:
  void check(const nlohmann::ordered_json& recorded) const {
    for (const auto& [key, value] : identity_.items()) {
      if (recorded.is_object() && recorded.contains(key) && recorded[key] == value) continue;
      throw UsageError(fmt::format(
          "{} holds the results of an evaluation with another {}; choose another --output, or "
          "remove the folder",
          path_.string(), key));
    }
  }

  fs::path path_;
  nlohmann::ordered_json identity_;
  std::unique_ptr<FileLock> lock_;
};

// Tells at once what went wrong with one task; the others go on.
void report_problem(const TaskResult& result) {
  if (result.status == TaskStatus::kDone) return;
  log_warning(fmt::format("{} {}: {}", result.task,
                          result.status == TaskStatus::kAbsent ? "is absent" : "failed",
                          result.message));
}

void throw_if_missing(const std::vector<TaskResult>& results) {
  std::vector<std::string> missing;
  for (const TaskResult& result : results) {
    if (result.status == TaskStatus::kDone) continue;
    missing.push_back(fmt::format("{} ({})", result.task, result.message));
  }
  if (missing.empty()) return;
  throw Error(fmt::format("{} of {} tasks gave no result: {}", missing.size(), results.size(),
                          fmt::join(missing, "; ")));
}

// The results of each task in turn, with a progress bar.
class Run {
 public:
  Run(const TaskArguments& arguments, const TaskModel& model,
      const std::vector<std::string>& folders, bool json)
      : arguments_(arguments), model_(model), folders_(folders), json_(json) {}

  void add(const std::string& task) {
    if (task != kPasskey) {
      add_result([&](const TaskRunOptions& options) {
        return try_task(model_.model, model_.tokenizer, task, folders_, options);
      });
      return;
    }
    for (const int64_t length : arguments_.passkey_lengths) {
      PasskeyOptions passkey = arguments_.passkey;
      passkey.length = length;
      add_result([&](const TaskRunOptions& options) {
        return try_passkey(model_.model, model_.tokenizer, passkey, options);
      });
    }
  }

  const std::vector<TaskResult>& results() const { return results_; }

 private:
  template <typename Evaluate>
  void add_result(const Evaluate& evaluate) {
    std::optional<Progress> progress;
    TaskRunOptions options = arguments_.options;
    const auto begin = std::chrono::steady_clock::now();
    options.progress = [&](const std::string& name, const LikelihoodProgress& state) {
      if (!progress) progress.emplace(name, state.tokens);
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
      progress->update(
          state.tokens_done,
          fmt::format("{} samples, {} tokens/s", state.groups_done,
                      format_count(static_cast<double>(state.tokens_done) / elapsed.count())));
    };
    TaskResult result = evaluate(options);
    if (progress) progress->finish();
    report_problem(result);
    if (json_) print_json_line(to_json(result));
    results_.push_back(std::move(result));
  }

  const TaskArguments& arguments_;
  const TaskModel& model_;
  const std::vector<std::string>& folders_;
  const bool json_;
  std::vector<TaskResult> results_;
};

}  // namespace

void add_task_options(CLI::App& command, TaskArguments& arguments) {
  const auto positive = CLI::Range(int64_t{1}, int64_t{1} << 30);
  TaskRunOptions& options = arguments.options;
  const std::string group = "Tasks";
  CLI::Option* tasks =
      command
          .add_option(
              "--tasks", arguments.tasks,
              fmt::format("Tasks of lm-evaluation-harness, separated by commas, on the files in "
                          "--data: {}, passkey, all, or available (those whose file is there)",
                          fmt::join(task_names(), ", ")))
          ->delimiter(',')
          ->allow_extra_args(false)
          ->type_name("NAME,...")
          ->group(group);
  command
      .add_option("--output", arguments.output,
                  "Folder for results.json, results.md and what the model said to each sample; a "
                  "stopped evaluation goes on there")
      ->type_name("FOLDER")
      ->needs(tasks)
      ->group(group);
  command.add_option("--shots", options.prompt.shots, "Examples with answers before each question")
      ->check(CLI::Range(0, 1000))
      ->capture_default_str()
      ->type_name("N")
      ->needs(tasks)
      ->group(group);
  command.add_option("--shot-seed", options.prompt.shot_seed, "Chooses the examples")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->type_name("N")
      ->needs(tasks)
      ->group(group);
  command.add_option("--limit", options.limit, "Only the first N samples of each task")
      ->check(positive)
      ->type_name("N")
      ->needs(tasks)
      ->group(group);
  command
      .add_option("--bos", arguments.bos,
                  "once: before each context or document; harness: as a tokenizer that adds it by "
                  "itself, so a document begins with two; never: before an empty context or a "
                  "document only")
      ->check(CLI::IsMember({"once", "harness", "never"}))
      ->capture_default_str()
      ->type_name("NAME")
      ->needs(tasks)
      ->group(group);
  command
      .add_flag("--separate-contexts", arguments.separate_contexts,
                "Read the context anew for every choice (slower; to compare)")
      ->needs(tasks)
      ->group(group);
  command
      .add_option("--passkey-lengths", arguments.passkey_lengths,
                  "Tokens of the passkey task's prompts, separated by commas")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(positive)
      ->capture_default_str()
      ->type_name("N,...")
      ->needs(tasks)
      ->group(group);
  command.add_option("--passkey-samples", arguments.passkey.samples, "Prompts of each length")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str()
      ->type_name("N")
      ->needs(tasks)
      ->group(group);
  command.add_option("--passkey-seed", arguments.passkey.seed, "Draws the numbers")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->type_name("N")
      ->needs(tasks)
      ->group(group);
  command
      .add_option("--haystack", arguments.haystack,
                  "Text whose sentences surround the number (default: five, repeated)")
      ->type_name("FILE")
      ->needs(tasks)
      ->group(group);
}

void run_tasks(TaskArguments arguments, const TaskModel& model,
               const std::vector<std::string>& folders, bool json) {
  arguments.options.prompt.bos = parse_bos_mode(arguments.bos);
  arguments.options.share_contexts = !arguments.separate_contexts;
  const std::vector<std::string> tasks = chosen_tasks(arguments.tasks, folders);
  const bool needs_files =
      std::any_of(tasks.begin(), tasks.end(), [](const auto& task) { return task != kPasskey; });
  if (needs_files && folders.empty()) {
    throw UsageError("give the folder of the tasks' files with --data");
  }
  for (const std::string& folder : folders) {
    if (!is_folder(folder)) throw Error(folder + " is not a folder; give that of the tasks' files");
  }
  if (!arguments.haystack.empty()) {
    arguments.passkey.haystack = read_text_file(arguments.haystack);
    arguments.passkey.haystack_path = arguments.haystack;
  }
  std::optional<OutputFolder> output;
  if (!arguments.output.empty()) {
    output.emplace(arguments.output, identity(arguments, model));
    arguments.options.output = arguments.output;
  }
  Run run(arguments, model, folders, json);
  for (const std::string& task : tasks) {
    run.add(task);
    if (output) output->write(run.results(), model.folder);
  }
  if (json) {
    fmt::print(stderr, "{}", markdown_table(run.results()));
  } else {
    print_text(markdown_table(run.results()));
  }
  throw_if_missing(run.results());
}

}  // namespace efla::cli
