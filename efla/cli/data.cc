// efla data prepare: text files to a folder of token shards.
#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <optional>

#include "efla/cli/commands.h"
#include "efla/cli/common.h"
#include "efla/io/prepare.h"
#include "efla/io/progress.h"

namespace efla::cli {
namespace {

struct PrepareArguments {
  std::vector<std::string> inputs;
  std::string tokenizer, output, format = "file";
  PrepareOptions options;
  bool no_bos = false, no_eos = false, force = false, json = false;
};

int64_t total_size(const std::vector<std::string>& paths) {
  int64_t bytes = 0;
  for (const std::string& path : paths) {
    std::error_code code;
    const auto size = std::filesystem::file_size(path, code);
    if (!code) bytes += static_cast<int64_t>(size);
  }
  return bytes;
}

void report(const PrepareArguments& arguments, const PrepareResult& result) {
  const double bytes_per_token =
      static_cast<double>(result.bytes) / static_cast<double>(result.tokens);
  if (arguments.json) {
    print_json_line({{"folder", arguments.output},
                     {"shards", result.shards},
                     {"documents", result.documents},
                     {"tokens", result.tokens},
                     {"bytes", result.bytes},
                     {"words", result.words},
                     {"bytes_per_token", bytes_per_token}});
    return;
  }
  print_text(fmt::format("{}: {} documents, {} tokens, {} bytes, {:.3f} bytes per token, {} {}\n",
                         arguments.output, with_commas(result.documents),
                         with_commas(result.tokens), with_commas(result.bytes), bytes_per_token,
                         result.shards, result.shards == 1 ? "shard" : "shards"));
}

void run_prepare(PrepareArguments arguments) {
  arguments.options.format = parse_document_format(arguments.format);
  arguments.options.add_bos = !arguments.no_bos;
  arguments.options.add_eos = !arguments.no_eos;
  refuse_overwrite(arguments.output, arguments.force);
  const auto tokenizer = Tokenizer::load(arguments.tokenizer);
  const int64_t total = total_size(arguments.inputs);
  std::optional<Progress> progress;  // begins with the first document, so that errors come alone
  const PrepareResult result = prepare_shards(
      arguments.inputs, *tokenizer, arguments.output, arguments.options,
      [&](const PrepareResult& so_far) {
        if (!progress) progress.emplace("tokenizing", total);
        // Compressed inputs hold more bytes of text than the files' size.
        progress->update(
            std::min(so_far.bytes, total),
            fmt::format("{} tokens", format_count(static_cast<double>(so_far.tokens))));
      });
  if (progress) {
    progress->update(total,
                     fmt::format("{} tokens", format_count(static_cast<double>(result.tokens))));
    progress->finish();
  }
  report(arguments, result);
}

}  // namespace

void add_data(CLI::App& app) {
  CLI::App* data = app.add_subcommand("data", "Prepare text for training and evaluation");
  data->require_subcommand(1);
  data->footer("Example:\n  efla data prepare --help");

  const auto arguments = std::make_shared<PrepareArguments>();
  CLI::App* prepare = data->add_subcommand("prepare", "Turn text files into token shards");
  prepare->add_option("--input", arguments->inputs, "Text files, plain, .gz or .xz")
      ->required()
      ->type_name("FILE");
  prepare->add_option("--tokenizer", arguments->tokenizer, "SentencePiece .model file, or: byte")
      ->required()
      ->type_name("FILE");
  prepare->add_option("--output", arguments->output, "Folder to write; appears when complete")
      ->required()
      ->type_name("FOLDER");
  prepare
      ->add_option("--format", arguments->format,
                   "What a document is: file (one a file), formfeed (separated by ^L lines), "
                   "jsonl (\"text\" of each line)")
      ->capture_default_str()
      ->type_name("NAME");
  prepare
      ->add_option("--tokens-per-shard", arguments->options.tokens_per_shard,
                   "A shard is closed after this many tokens")
      ->capture_default_str()
      ->type_name("N");
  prepare->add_flag("--no-bos", arguments->no_bos, "Put no BOS before documents");
  prepare->add_flag("--no-eos", arguments->no_eos, "Put no EOS after documents");
  prepare->add_flag("--force", arguments->force, "Replace an existing folder of shards");
  prepare->add_flag("--json", arguments->json, "Print the result as a JSON line");
  prepare->footer(
      "Example:\n  efla data prepare --input emma.txt persuasion.txt --tokenizer "
      "data/tokenizer.model --output data/train");
  prepare->callback([arguments] { run_prepare(*arguments); });
}

}  // namespace efla::cli
