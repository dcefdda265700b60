// efla eval: held-out loss of a model, by two named conventions.
#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>

#include "efla/cli/commands.h"
#include "efla/cli/common.h"
#include "efla/eval/perplexity.h"
#include "efla/io/error.h"
#include "efla/io/progress.h"
#include "efla/nn/pretrained.h"

namespace efla::cli {
namespace {

struct Arguments {
  std::string model, data, tokenizer, format = "file", metric = "both";
  std::vector<std::string> text;
  int64_t window = 0, max_tokens = 0;
  PerplexityOptions options;
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
          : eval_data_from_shards(arguments.data, tokenizer);
  if (arguments.max_tokens > 0) data.limit(arguments.max_tokens, tokenizer);
  return data;
}

void print_json(const Arguments& arguments, const std::string& model, const Measured& measured) {
  const Perplexity& p = measured.perplexity;
  nlohmann::ordered_json data = arguments.text;
  if (!arguments.data.empty()) data = arguments.data;
  print_json_line({{"metric", p.metric},
                   {"model", model},
                   {"data", data},
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

void run(const Arguments& arguments) {
  if (arguments.data.empty() == arguments.text.empty()) {
    throw UsageError("give the held-out text either as shards with --data or as files with --text");
  }
  const bool stateful = arguments.metric != "windows";
  const bool windows = arguments.metric != "stateful";
  const std::string folder = find_model(arguments.model);
  LanguageModel model = load_pretrained(folder);
  const ModelConfig& config = model->config();
  const std::filesystem::path shards = arguments.data;
  const std::string data_folder =
      std::filesystem::is_directory(shards) ? shards.string() : shards.parent_path().string();
  const auto tokenizer = find_tokenizer(arguments.tokenizer, folder, data_folder, config);
  const EvalData data = load_data(arguments, *tokenizer);
  const int64_t window = arguments.window > 0 ? arguments.window : config.max_position_embeddings;

  std::vector<Measured> results;
  const auto add = [&](Measured measured) {
    if (arguments.json) print_json(arguments, folder, measured);
    results.push_back(std::move(measured));
  };
  if (stateful) {
    add(measure("stateful", arguments.options, [&](const PerplexityOptions& options) {
      return stateful_perplexity(model, data, options);
    }));
  }
  if (windows) {
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

}  // namespace

void add_eval(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand("eval", "Measure a model's loss on held-out text");
  command->description(
      "Measure a model's loss on held-out text.\n\n"
      "stateful   every token is predicted from its whole document (the state is carried)\n"
      "windows-L  lm-evaluation-harness's rolling windows of L tokens, each from an empty state");
  command->add_option("--model", arguments->model, "Model folder, checkpoint or run folder")
      ->required()
      ->type_name("FOLDER");
  command->add_option("--data", arguments->data, "Token shards: a folder or one file")
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
  command->add_option("--metric", arguments->metric, "stateful, windows or both")
      ->check(CLI::IsMember({"stateful", "windows", "both"}))
      ->capture_default_str()
      ->type_name("NAME");
  command
      ->add_option("--window", arguments->window,
                   "L of windows-L (default: the model's max_position_embeddings)")
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
                    "Print one JSON line per metric on stdout and the table on stderr");
  command->footer("Example:\n  efla eval --model runs/austen --data data/valid --window 1024");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace efla::cli
