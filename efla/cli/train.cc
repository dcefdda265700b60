// efla train: a recipe in, a trained model out.
#include <fmt/format.h>

#include <memory>
#include <string>
#include <vector>

#include "efla/cli/commands.h"
#include "efla/train/recipe.h"
#include "efla/train/trainer.h"

namespace efla::cli {
namespace {

struct TrainArguments {
  std::string config;
  std::vector<std::string> overrides;
  bool fresh = false;
  bool show_recipe = false;
};

void print_held_out(const TrainResult& result) {
  const HeldOutPoint &before = result.first_held_out, &after = result.held_out;
  if (after.tokens == 0) return;  // no held-out data
  fmt::print("held-out loss  {:.4f} nats per token before, {:.4f} after ({})\n", before.loss,
             after.loss, result.convention);
  std::string over =
      fmt::format("{} {} tokens", result.whole_held_out ? "all" : "the first", after.tokens);
  if (before.tokens != after.tokens) over += fmt::format(" after, {} before", before.tokens);
  fmt::print("held-out bits per byte: before {:.4f}, after {:.4f} ({})\n", before.bits_per_byte,
             after.bits_per_byte, over);
}

void print_result(const TrainResult& result) {
  if (result.step < result.total_steps) {
    fmt::print("stopped by train.time_limit after step {} of {}; with a higher one {}\n",
               result.step, result.total_steps, result.go_on);
  }
  fmt::print("training loss  {:.4f} nats per token after {} steps ({} skipped)\n",
             result.train_loss, result.step, result.skipped_steps);
  print_held_out(result);
  fmt::print("model          {}\ncheckpoint     {}\nmetrics        {}/metrics.jsonl\n",
             result.model, result.checkpoint, result.run_folder);
  if (!result.picture.empty()) fmt::print("loss curve     {}\n", result.picture);
}

void run(const TrainArguments& arguments) {
  const Recipe recipe = Recipe::load(arguments.config, arguments.overrides);
  if (arguments.show_recipe) {
    fmt::print("{}", recipe.to_toml());
    return;
  }
  TrainOptions options;
  options.fresh = arguments.fresh;
  options.command = {"efla", "train", arguments.config};
  options.command.insert(options.command.end(), arguments.overrides.begin(),
                         arguments.overrides.end());
  print_result(train(recipe, options));
}

}  // namespace

void add_train(CLI::App& app) {
  const auto arguments = std::make_shared<TrainArguments>();
  CLI::App* command = app.add_subcommand(
      "train", "Train a language model from a recipe, or go on with the run in its folder");
  command->add_option("CONFIG", arguments->config, "Recipe, a TOML file")->required();
  command
      ->add_option("OVERRIDES", arguments->overrides,
                   "Values that replace the recipe's, as section.key=value")
      ->type_name("KEY=VALUE");
  command->add_flag("--fresh", arguments->fresh,
                    "Start over in a new folder (OUT-2, OUT-3, ...) instead of going on");
  command->add_flag("--show-recipe", arguments->show_recipe,
                    "Print every value of the recipe and stop");
  command->footer(
      "A run that was stopped or killed goes on when the same command is given again, and its "
      "losses\n"
      "are bit for bit those of a run left alone (same number of threads). Ctrl-C finishes the\n"
      "step, saves and exits; a second one exits at once. Held-out losses are those of rows of\n"
      "data.length tokens that each start with an empty state (rows-LENGTH); efla eval has "
      "others.\n\n"
      "Example:\n"
      "  efla train configs/quickstart.toml train.steps=500 train.out=runs/short\n");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace efla::cli
