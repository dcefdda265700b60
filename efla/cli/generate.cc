// efla generate: continue a prompt.
#include <fmt/format.h>
#include <unistd.h>

#include <memory>

#include "efla/cli/commands.h"
#include "efla/cli/common.h"
#include "efla/eval/generate.h"
#include "efla/io/documents.h"
#include "efla/io/error.h"
#include "efla/io/utf8.h"
#include "efla/nn/pretrained.h"

namespace efla::cli {
namespace {

struct Arguments {
  std::string model, tokenizer, prompt, prompt_file;
  bool prompt_given = false, greedy = false, echo = false, json = false;
  int64_t samples = 1;
  GenerateOptions options;
};

// A text that an editor or `echo` wrote ends in a newline that is not meant as part of the prompt.
std::string without_last_newline(std::string text) {
  if (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

std::string read_prompt(const Arguments& arguments) {
  if (arguments.prompt_given && !arguments.prompt_file.empty()) {
    throw UsageError("give either --prompt or --prompt-file, not both");
  }
  if (arguments.prompt_given) return arguments.prompt;
  if (!arguments.prompt_file.empty()) {
    const std::string text = read_text_file(arguments.prompt_file);
    validate_utf8(text, arguments.prompt_file);
    return without_last_newline(text);
  }
  if (::isatty(STDIN_FILENO) == 1) fmt::print(stderr, "Type the prompt, then Ctrl-D.\n");
  return without_last_newline(read_standard_input());
}

void print_statistics(const Generator& generator, int64_t state_bytes, const Generation& result) {
  const auto count = static_cast<double>(result.tokens.size());
  fmt::print(stderr,
             "prompt {} tokens in {:.2f} s; {} tokens in {:.2f} s, {:.1f} tokens/s; stopped by {}; "
             "state {}\n",
             generator.prompt_tokens(), generator.prompt_seconds(), result.tokens.size(),
             result.seconds, count / std::max(result.seconds, 1e-9), to_string(result.reason),
             human_bytes(state_bytes));
}

nlohmann::ordered_json to_json(const Arguments& arguments, const std::string& prompt,
                               const Generator& generator, int64_t sample,
                               const Generation& result) {
  return {{"sample", sample},
          {"seed", arguments.options.sampling.seed},
          {"prompt", prompt},
          {"text", result.text},
          {"tokens", result.tokens},
          {"stopped_by", to_string(result.reason)},
          {"prompt_tokens", generator.prompt_tokens()},
          {"prompt_seconds", generator.prompt_seconds()},
          {"seconds", result.seconds}};
}

void run(Arguments arguments) {
  GenerateOptions& options = arguments.options;
  if (arguments.greedy) options.sampling.temperature = 0;
  options.validate();
  const std::string folder = find_model(arguments.model);
  LanguageModel model = load_pretrained(folder);
  const auto tokenizer = find_tokenizer(arguments.tokenizer, folder, "", model->config());
  const std::string prompt = read_prompt(arguments);
  Generator generator(model, *tokenizer);
  generator.read_prompt(prompt);
  for (int64_t sample = 0; sample < arguments.samples; ++sample) {
    if (arguments.json) {
      const Generation result = generator.generate(options, sample);
      print_json_line(to_json(arguments, prompt, generator, sample, result));
      continue;
    }
    if (arguments.samples > 1) print_text(fmt::format("=== sample {} ===\n", sample + 1));
    if (arguments.echo) print_text(prompt);
    const Generation result = generator.generate(options, sample, print_text);
    print_text("\n");
    print_statistics(generator, generator.state_bytes(), result);
  }
}

void add_sampling_options(CLI::App& command, Arguments& arguments) {
  SamplingOptions& sampling = arguments.options.sampling;
  command
      .add_option("--max-tokens", arguments.options.max_tokens, "Longest continuation in tokens")
      ->capture_default_str()
      ->type_name("N");
  command.add_option("--temperature", sampling.temperature, "Logits are divided by it; 0: greedy")
      ->capture_default_str()
      ->type_name("X");
  command.add_flag("--greedy", arguments.greedy, "Always take the likeliest token");
  command.add_option("--top-k", sampling.top_k, "Draw from the K likeliest tokens; 0: all")
      ->capture_default_str()
      ->type_name("K");
  command
      .add_option("--top-p", sampling.top_p,
                  "Draw from the likeliest tokens that together have probability P")
      ->capture_default_str()
      ->type_name("P");
  command
      .add_option("--repetition-penalty", sampling.repetition_penalty,
                  "Above 1: tokens that occurred are less likely")
      ->capture_default_str()
      ->type_name("X");
  command.add_option("--seed", sampling.seed, "Same seed, same text")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->type_name("N");
  command
      .add_option("--stop", arguments.options.stop,
                  "End before this text; may be given several times")
      ->allow_extra_args(false)
      ->type_name("TEXT");
  command.add_flag("--ignore-eos", arguments.options.ignore_eos,
                   "Never draw the end-of-text token");
  command.add_option("--samples", arguments.samples, "Number of continuations")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
      ->capture_default_str()
      ->type_name("N");
}

}  // namespace

void add_generate(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  arguments->options.sampling.seed = 42;
  CLI::App* command = app.add_subcommand("generate", "Continue a prompt");
  command->add_option("--model", arguments->model, "Model folder, checkpoint or run folder")
      ->required()
      ->type_name("FOLDER");
  CLI::Option* prompt = command
                            ->add_option("--prompt", arguments->prompt,
                                         "The text to continue (default: standard input)")
                            ->type_name("TEXT");
  command
      ->add_option("--prompt-file", arguments->prompt_file,
                   "Read the prompt from a file; a newline at its end is dropped")
      ->type_name("FILE");
  command
      ->add_option("--tokenizer", arguments->tokenizer,
                   "SentencePiece .model file, or: byte (default: tokenizer.model beside the "
                   "model)")
      ->type_name("FILE");
  add_sampling_options(*command, *arguments);
  command->add_flag("--echo", arguments->echo, "Print the prompt before its continuation");
  command->add_flag("--json", arguments->json, "Print one JSON line per continuation");
  command->footer(
      "Example:\n  efla generate --model runs/austen --prompt \"It is a truth\" --temperature 0.8 "
      "--top-p 0.95 --seed 7");
  command->callback([arguments, prompt] {
    arguments->prompt_given = prompt->count() > 0;
    run(*arguments);
  });
}

}  // namespace efla::cli
