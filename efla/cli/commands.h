// The subcommands of `efla`, one per file of this folder. Each function adds its subcommand to the
// application: options, an example in the footer, and a callback that does the work. A callback
// returns normally for success (exit code 0) and throws Error (1) or UsageError (2) otherwise;
// main.cc turns every exception into one sentence on stderr.
#pragma once

#include <CLI/CLI.hpp>

namespace efla::cli {

void add_train(CLI::App& app);
void add_eval(CLI::App& app);
void add_generate(CLI::App& app);
void add_tokenizer(CLI::App& app);
void add_data(CLI::App& app);
void add_convert(CLI::App& app);
void add_bench(CLI::App& app);
void add_info(CLI::App& app);
void add_smnist(CLI::App& app);
void add_flow(CLI::App& app);

}  // namespace efla::cli
