// efla flow: the integrators beside a fine integration.
#include <fmt/format.h>

#include <memory>
#include <string>

#include "efla/cli/commands.h"
#include "efla/cli/common.h"
#include "efla/experiments/flow_study.h"
#include "efla/io/atomic_file.h"

namespace efla::cli {
namespace {

struct FlowArguments {
  FlowStudyOptions options;
  std::string out = "runs/flow";
};

void run(const FlowArguments& arguments) {
  make_folder(arguments.out);  // what cannot be written is said before the work
  const std::vector<FlowPoint> points = run_flow_study(arguments.options);
  const bool drawn = write_flow_study(arguments.out, points);
  print_text(flow_table(points));
  print_text(fmt::format("\nfigures  {}/flow.csv\n", arguments.out));
  if (drawn) print_text(fmt::format("picture  {}/flow.png\n", arguments.out));
}

}  // namespace

void add_flow(CLI::App& app) {
  const auto a = std::make_shared<FlowArguments>();
  CLI::App* command = app.add_subcommand(
      "flow", "Integrator study: Euler, RK-2, RK-4 and the exact step beside a fine integration");
  const auto number = [&](const char* name, int64_t& value, const char* what, int64_t most) {
    command->add_option(name, value, what)
        ->check(CLI::Range(int64_t{1}, most))
        ->capture_default_str()
        ->type_name("N");
  };
  number("--dim", a->options.dim, "Size of keys and values", 256);
  number("--tokens", a->options.tokens, "Tokens of the sequences whose state is followed", 4096);
  number("--pairs", a->options.pairs, "Pairs stored before the noise", 4096);
  number("--noise", a->options.noise, "Tokens of noise after them", 4096);
  number("--sequences", a->options.sequences, "Sequences per point, of which the median counts",
         1000);
  command->add_option("--seed", a->options.seed, "Seed of the first sequence")
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--out", a->out, "Folder for flow.csv and flow.png")
      ->capture_default_str()
      ->type_name("DIR");
  command->footer(
      "x = beta |k|^2 is the length of a token's step in units of the equation's own time. Euler "
      "is\n"
      "DeltaNet's rule, \"exact\" EFLA's; \"fine\" is the equation in many small steps.\n\n"
      "Example:\n"
      "  efla flow --out runs/flow");
  command->callback([a] { run(*a); });
}

}  // namespace efla::cli
