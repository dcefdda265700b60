// efla eval: held-out loss of a model by named conventions, and tasks (eval_tasks.h).
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>

#include "efla/cli/commands.h"
#include "efla/cli/common.h"
#include "efla/cli/eval_tasks.h"
#include "efla/eval/perplexity.h"
#include "efla/eval/positions.h"
#include "efla/io/error.h"
#include "efla/io/progress.h"
#include "efla/nn/pretrained.h"

namespace efla::cli {
namespace {

struct Arguments {
  std::string model, tokenizer, format = "file", metric = "both";
  std::string device = "auto", dtype = "stored";
  std::vector<std::string> data, text;
  int64_t window = 0, max_tokens = 0, positions = 65536;
  PerplexityOptions options;
  TaskArguments tasks;
  bool json = false;
};

struct Measured {
  Perplexity perplexity;
  double seconds = 0;
};

// Runs one metric under a progress bar, which begins with the first batch so that errors come
// alone.
template <typename Metric>
Measured measure(const std::string& label, PerplexityOptions options, const Metric& metric) {
  const auto begin = std::chrono::steady_clock::now();
  const auto elapsed = [begin] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  std::optional<Progress> progress;
  options.progress = [&](int64_t done, int64_t total) {
    if (!progress) progress.emplace(label, total);
    progress->update(
        done, fmt::format("{} tokens/s", format_count(static_cast<double>(done) / elapsed())));
  };
  const Perplexity perplexity = metric(options);
  if (progress) progress->finish();
  return {perplexity, elapsed()};
}

EvalData load_data(const Arguments& arguments, const Tokenizer& tokenizer) {
  EvalData data =
      arguments.data.empty()
          ? eval_data_from_text(arguments.text, parse_document_format(arguments.format), tokenizer)
          : eval_data_from_shards(arguments.data[0], tokenizer);
  if (arguments.max_tokens > 0) data.limit(arguments.max_tokens, tokenizer);
  return data;
}

nlohmann::ordered_json data_names(const Arguments& arguments) {
  if (arguments.data.empty()) return arguments.text;
  return arguments.data[0];
}

void print_json(const Arguments& arguments, const std::string& model, const Measured& measured) {
  const Perplexity& p = measured.perplexity;
  print_json_line({{"metric", p.metric},
                   {"model", model},
                   {"data", data_names(arguments)},
                   {"documents", p.documents},
                   {"tokens", p.tokens},
                   {"words", p.words},
                   {"bytes", p.bytes},
                   {"nll", p.nll},
                   {"loss", p.nll / static_cast<double>(p.tokens)},
                   {"token_perplexity", p.token_perplexity()},
                   {"word_perplexity", p.word_perplexity()},
                   {"byte_perplexity", p.byte_perplexity()},
                   {"bits_per_byte", p.bits_per_byte()},
                   {"seconds", measured.seconds}});
}

std::string table(const std::vector<Measured>& results) {
  const Perplexity& first = results.front().perplexity;
  std::string text =
      fmt::format("{} documents, {} tokens, {} words, {} bytes\n\n", with_commas(first.documents),
                  with_commas(first.tokens), with_commas(first.words), with_commas(first.bytes));
  text += fmt::format("{:<16}{:>12}{:>12}{:>16}{:>12}{:>15}\n", "metric", "loss", "token ppl",
                      "word ppl", "byte ppl", "bits per byte");
  for (const Measured& result : results) {
    const Perplexity& p = result.perplexity;
    text += fmt::format("{:<16}{:>12.4f}{:>12.3f}{:>16.3f}{:>12.4f}{:>15.4f}\n", p.metric,
                        p.nll / static_cast<double>(p.tokens), p.token_perplexity(),
                        p.word_perplexity(), p.byte_perplexity(), p.bits_per_byte());
  }
  return text;
}

// The loss at each range of positions: a table, or one JSON line for each range.
void run_positions(const Arguments& arguments, const LanguageModel& model, const EvalData& data,
                   const std::string& folder) {
  const std::string name = fmt::format("positions-{}", arguments.positions);
  PositionLoss loss;
  measure(name, arguments.options, [&](const PerplexityOptions& options) {
    loss = position_loss(model, data, arguments.positions, options);
    return Perplexity{};
  });
  std::string text = fmt::format("{} segments of {} tokens\n\n{:>20}{:>12}{:>12}{:>12}\n",
                                 with_commas(loss.segments), with_commas(loss.length), "positions",
                                 "loss", "stderr", "token ppl");
  for (const PositionRange& range : loss.ranges) {
    const std::string error = range.error ? fmt::format("{:.4f}", *range.error) : "";
    text += fmt::format("{:>20}{:>12.4f}{:>12}{:>12.3f}\n",
                        fmt::format("{} - {}", range.begin, range.end - 1), range.loss, error,
                        std::exp(range.loss));
    if (!arguments.json) continue;
    nlohmann::ordered_json line = {{"metric", name},
                                   {"model", folder},
                                   {"data", data_names(arguments)},
                                   {"segments", loss.segments},
                                   {"begin", range.begin},
                                   {"end", range.end},
                                   {"loss", range.loss},
                                   {"loss_stderr", nullptr},
                                   {"token_perplexity", std::exp(range.loss)}};
    if (range.error) line["loss_stderr"] = *range.error;
    print_json_line(line);
  }
  if (arguments.json) {
    fmt::print(stderr, "{}", text);
  } else {
    print_text(text);
  }
}

bool use_cuda(const std::string& device) {
#ifdef EFLA_WITH_CUDA
  if (device == "auto") return torch::cuda::is_available();
  if (device == "cuda" && !torch::cuda::is_available()) {
    throw Error("--device cuda: no CUDA device here; use --device cpu");
  }
#else
  if (device == "cuda") {
    throw Error("--device cuda: this build has no CUDA part; build with scripts/build.sh cuda");
  }
#endif
  return device == "cuda";
}

LanguageModel load_model(const Arguments& arguments, const std::string& folder) {
  std::optional<at::ScalarType> dtype;
  if (arguments.dtype == "float32") dtype = at::kFloat;
  if (arguments.dtype == "bfloat16") dtype = at::kBFloat16;
  LanguageModel model = load_pretrained(folder, dtype);
  if (use_cuda(arguments.device)) model->to(at::Device(at::kCUDA, 0));
  return model;
}

// The metrics of held-out text.
void run_text(const Arguments& arguments, const LanguageModel& model, const EvalData& data,
              const std::string& folder, int64_t window) {
  std::vector<Measured> results;
  const auto add = [&](Measured measured) {
    if (arguments.json) print_json(arguments, folder, measured);
    results.push_back(std::move(measured));
  };
  if (arguments.metric != "windows") {
    add(measure("stateful", arguments.options, [&](const PerplexityOptions& options) {
      return stateful_perplexity(model, data, options);
    }));
  }
  if (arguments.metric != "stateful") {
    const std::string label = fmt::format("windows-{}", window);
    add(measure(label, arguments.options, [&](const PerplexityOptions& options) {
      return windowed_perplexity(model, data, window, options);
    }));
  }
  if (arguments.json) {
    fmt::print(stderr, "{}", table(results));
  } else {
    print_text(table(results));
  }
}

void check_sources(const Arguments& arguments) {
  if (!arguments.tasks.tasks.empty()) {
    if (arguments.text.empty()) return;
    throw UsageError("--tasks reads the files in --data; leave --text out");
  }
  if (arguments.data.empty() == arguments.text.empty()) {
    throw UsageError(
        "give the held-out text either as shards with --data or as files with --text, or choose "
        "--tasks");
  }
  if (arguments.data.size() > 1) {
    throw UsageError("without --tasks, --data takes one folder or file of shards");
  }
}

void run(const Arguments& arguments) {
  check_sources(arguments);
  const std::string folder = find_model(arguments.model);
  const LanguageModel model = load_model(arguments, folder);
  const ModelConfig& config = model->config();
  const int64_t window = arguments.window > 0 ? arguments.window : config.max_position_embeddings;
  if (!arguments.tasks.tasks.empty()) {
    const auto tokenizer = find_tokenizer(arguments.tokenizer, folder, "", config);
    TaskArguments tasks = arguments.tasks;
    tasks.options.prompt.max_length = window;
    tasks.options.batch_tokens = arguments.options.batch_tokens;
    run_tasks(std::move(tasks), {model, *tokenizer, folder}, arguments.data, arguments.json);
    return;
  }
  const std::filesystem::path shards = arguments.data.empty() ? "" : arguments.data[0];
  const std::string data_folder =
      std::filesystem::is_directory(shards) ? shards.string() : shards.parent_path().string();
  const auto tokenizer = find_tokenizer(arguments.tokenizer, folder, data_folder, config);
  const EvalData data = load_data(arguments, *tokenizer);
  if (arguments.metric == "positions") {
    run_positions(arguments, model, data, folder);
  } else {
    run_text(arguments, model, data, folder, window);
  }
}

}  // namespace

void add_eval(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand(
      "eval",
      "Measure a model's loss on held-out text, or its score in lm-evaluation-harness's tasks");
  command->description(
      "Measure a model's loss on held-out text, or its score in lm-evaluation-harness's tasks.\n\n"
      "stateful   every token is predicted from its whole document (the state is carried)\n"
      "windows-L  lm-evaluation-harness's rolling windows of L tokens, each from an empty state\n"
      "positions  the loss at each range of positions of long texts, the state carried");
  command->add_option("--model", arguments->model, "Model folder, checkpoint or run folder")
      ->required()
      ->type_name("FOLDER");
  command
      ->add_option(
          "--data", arguments->data,
          "Token shards, a folder or one file; with --tasks: the folder of the tasks' files "
          "(may be given several times)")
      ->allow_extra_args(false)
      ->type_name("PATH");
  command->add_option("--text", arguments->text, "Text files, plain, .gz or .xz")
      ->type_name("FILE");
  command
      ->add_option("--format", arguments->format,
                   "What a document of --text is: file, formfeed or jsonl")
      ->capture_default_str()
      ->type_name("NAME");
  command
      ->add_option("--tokenizer", arguments->tokenizer,
                   "SentencePiece .model file, or: byte (default: tokenizer.model beside the "
                   "model)")
      ->type_name("FILE");
  command->add_option("--metric", arguments->metric, "stateful, windows, both or positions")
      ->check(CLI::IsMember({"stateful", "windows", "both", "positions"}))
      ->capture_default_str()
      ->type_name("NAME");
  command
      ->add_option("--positions", arguments->positions,
                   "Length of the segments that --metric positions cuts documents into")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--device", arguments->device, "Where to run")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command->add_option("--dtype", arguments->dtype, "Weights as they are stored, or converted")
      ->check(CLI::IsMember({"stored", "float32", "bfloat16"}))
      ->capture_default_str();
  command
      ->add_option("--window", arguments->window,
                   "L of windows-L, and the most tokens of a task's prompt (default: the model's "
                   "max_position_embeddings)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
      ->type_name("N");
  command
      ->add_option("--max-tokens", arguments->max_tokens,
                   "Evaluate on the first N tokens (default: all)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 60))
      ->type_name("N");
  command
      ->add_option("--batch-tokens", arguments->options.batch_tokens,
                   "Tokens of one forward call; changes speed and memory, not the result")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
      ->capture_default_str()
      ->type_name("N");
  command->add_flag("--json", arguments->json,
                    "Print one JSON line per metric or task on stdout and the table on stderr");
  add_task_options(*command, arguments->tasks);
  for (const char* name : {"--metric", "--positions", "--max-tokens", "--format"}) {
    command->get_option(name)->excludes(command->get_option("--tasks"));
  }
  command->footer(
      "Example:\n  efla eval --model runs/austen --data data/valid --window 1024\n"
      "  efla eval --model runs/austen --tasks piqa,arc_easy --data data/tasks --output "
      "runs/scores\n"
      "  efla eval --model runs/austen --tasks passkey --passkey-lengths 1024,16384");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace efla::cli
