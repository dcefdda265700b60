// efla tokenizer train|encode|decode.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <filesystem>
#include <memory>

#include "efla/cli/commands.h"
#include "efla/cli/common.h"
#include "efla/io/atomic_file.h"
#include "efla/io/documents.h"
#include "efla/io/error.h"
#include "efla/io/tokenizer.h"

namespace efla::cli {
namespace {

namespace fs = std::filesystem;

struct TrainArguments {
  std::vector<std::string> inputs;
  std::string output;
  TokenizerTraining training;
  bool force = false;
};

void run_train(TrainArguments arguments) {
  const fs::path output = arguments.output;
  if (output.extension() != ".model" || output.stem().empty()) {
    throw UsageError(
        fmt::format("--output is {} but must name a file that ends in .model", arguments.output));
  }
  refuse_overwrite(arguments.output, arguments.force);
  if (output.has_parent_path()) make_folder(output.parent_path());
  const std::string prefix = (output.parent_path() / output.stem()).string();
  const fs::path written = train_sentencepiece(arguments.inputs, prefix, arguments.training);
  const auto tokenizer = Tokenizer::load(written.string());
  fmt::print("{}: {} tokens, fingerprint {}\n", written.string(),
             with_commas(tokenizer->vocab_size()), tokenizer->fingerprint());
}

struct CodecArguments {
  std::string tokenizer;
  std::string input;
  std::vector<std::string> values;
};

// The words of the command line, else the file, else standard input.
std::string input_text(const CodecArguments& arguments) {
  if (!arguments.values.empty()) return fmt::format("{}", fmt::join(arguments.values, " "));
  return arguments.input.empty() ? read_standard_input() : read_text_file(arguments.input);
}

void run_encode(const CodecArguments& arguments) {
  const auto tokenizer = Tokenizer::load(arguments.tokenizer);
  print_text(fmt::format("{}\n", fmt::join(tokenizer->encode(input_text(arguments)), " ")));
}

void run_decode(const CodecArguments& arguments) {
  const auto tokenizer = Tokenizer::load(arguments.tokenizer);
  const std::string text = input_text(arguments);
  std::vector<int32_t> ids;
  constexpr std::string_view kBetween = " \t\r\n,[]";
  for (size_t begin = 0; (begin = text.find_first_not_of(kBetween, begin)) != std::string::npos;) {
    const size_t end = std::min(text.find_first_of(kBetween, begin), text.size());
    int32_t id = 0;
    const auto parsed = std::from_chars(text.data() + begin, text.data() + end, id);
    if (parsed.ec != std::errc() || parsed.ptr != text.data() + end) {
      throw Error(
          fmt::format("'{}' (byte {} of the input) is not a token id; give whole numbers "
                      "separated by spaces",
                      text.substr(begin, std::min<size_t>(end - begin, 40)), begin));
    }
    ids.push_back(id);
    begin = end;
  }
  print_text(tokenizer->decode(ids));
}

void add_codec(CLI::App& parent, const char* name, const char* what, const char* values,
               const char* example, void (*run)(const CodecArguments&)) {
  const auto arguments = std::make_shared<CodecArguments>();
  CLI::App* command = parent.add_subcommand(name, what);
  command->add_option("--tokenizer", arguments->tokenizer, "SentencePiece .model file, or: byte")
      ->required()
      ->type_name("FILE");
  command->add_option("--input", arguments->input, "Read this file (default: standard input)")
      ->type_name("FILE");
  command->add_option("VALUES", arguments->values, values)->type_name("");
  command->footer(example);
  command->callback([arguments, run] { run(*arguments); });
}

}  // namespace

void add_tokenizer(CLI::App& app) {
  CLI::App* tokenizer = app.add_subcommand("tokenizer", "Train a tokenizer, or use one");
  tokenizer->require_subcommand(1);
  tokenizer->footer("Example:\n  efla tokenizer train --help");

  const auto arguments = std::make_shared<TrainArguments>();
  CLI::App* train = tokenizer->add_subcommand("train", "Train a SentencePiece model on text");
  train->add_option("--input", arguments->inputs, "Text files, plain, .gz or .xz")
      ->required()
      ->type_name("FILE");
  train->add_option("--output", arguments->output, "The model to write, NAME.model")
      ->required()
      ->type_name("FILE");
  TokenizerTraining& training = arguments->training;
  train->add_option("--vocab-size", training.vocab_size, "Tokens in all, byte tokens included")
      ->capture_default_str()
      ->type_name("N");
  train->add_option("--type", training.model_type, "bpe or unigram")
      ->capture_default_str()
      ->type_name("NAME");
  train
      ->add_option("--character-coverage", training.character_coverage,
                   "Share of the characters that get tokens; the rest is spelled in bytes")
      ->capture_default_str()
      ->type_name("X");
  train
      ->add_option("--max-lines", training.max_sentences,
                   "Train on a random sample of this many lines; 0: all")
      ->capture_default_str()
      ->type_name("N");
  train->add_option("--seed", training.seed, "Seed of that sample")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->type_name("N");
  train->add_flag("--force", arguments->force, "Replace an existing file");
  train->footer(
      "Example:\n  efla tokenizer train --input emma.txt persuasion.txt --vocab-size 4096 "
      "--output data/tokenizer.model");
  train->callback([arguments] { run_train(*arguments); });

  add_codec(*tokenizer, "encode", "Print the token ids of a text", "The text",
            "Example:\n  efla tokenizer encode --tokenizer data/tokenizer.model \"It was a\"",
            run_encode);
  add_codec(*tokenizer, "decode", "Print the text of token ids", "The token ids",
            "Example:\n  efla tokenizer decode --tokenizer data/tokenizer.model 314 271 9",
            run_decode);
}

}  // namespace efla::cli
