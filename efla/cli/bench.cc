// efla bench: how fast the operators are on this machine.
#include <torch/torch.h>

#include <memory>

#include "efla/cli/commands.h"
#include "efla/cli/operator_bench.h"
#include "efla/io/error.h"

namespace efla::cli {
namespace {

struct Arguments {
  std::string device = "auto";
  OperatorBenchOptions options;
};

void run(const Arguments& a) {
  bool cuda = a.device == "cuda";
#ifdef EFLA_WITH_CUDA
  if (a.device == "auto") cuda = torch::cuda::is_available();
  if (cuda && !torch::cuda::is_available()) {
    throw Error("--device cuda: no CUDA device here; use --device cpu");
  }
#else
  if (cuda) {
    throw Error("--device cuda: this build has no CUDA part; build with scripts/build.sh cuda");
  }
#endif
  cuda ? bench_operators_on_cuda(a.options) : bench_operators_on_cpu(a.options);
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* bench = app.add_subcommand("bench", "Measure how fast this machine runs EFLA");
  bench->require_subcommand(1);
  bench->footer("Example:\n  efla bench op --device cpu --threads 2");
  CLI::App* op = bench->add_subcommand(
      "op", "The delta-rule operators: a table of times, each row checked first");
  const auto a = std::make_shared<Arguments>();
  op->add_option("--device", a->device, "Where to run")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  op->add_option("--rounds", a->options.rounds, "Rounds of each measurement")
      ->check(CLI::Range(3, 1000))
      ->capture_default_str()
      ->type_name("N");
  op->add_option("--only", a->options.only,
                 "Only the operation of this name; NAME* for all that begin with NAME")
      ->type_name("NAME");
  op->add_option("--csv", a->options.csv, "Also write the rows to this file")->type_name("FILE");
  op->add_flag("--default-malloc", a->options.default_malloc,
               "CPU: let malloc return memory to the system, so that results fault pages in anew");
  op->footer("Example:\n  efla bench op --only 'forward*' --csv rows.csv");
  op->callback([a] { run(*a); });
}

}  // namespace efla::cli
