// The program `efla`: parses the command line, runs one subcommand and turns whatever went wrong
// into one sentence on stderr and an exit code (0 ok, 1 failed, 2 bad usage).
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "efla/cli/commands.h"
#include "efla/io/error.h"
#include "efla/train/nearest_name.h"

namespace efla::cli {
namespace {

constexpr int kFailed = 1;
constexpr int kBadUsage = 2;

std::string first_line(std::string_view text) {
  return std::string(text.substr(0, text.find('\n')));
}

int report(int code, const std::string& message) {
  std::fflush(stdout);
  fmt::print(stderr, "efla: error: {}\n", message);
  return code;
}

std::vector<std::string> subcommand_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(sub->get_name());
  }
  return names;
}

// "efla eval" for the innermost subcommand that was reached, so that an error can point at its
// help.
std::string command_path(const CLI::App& app) {
  std::string path = app.get_name();
  const CLI::App* current = &app;
  while (!current->get_subcommands().empty()) {
    current = current->get_subcommands().front();
    path += " " + current->get_name();
  }
  return path;
}

// The first word that should name a subcommand but does not, with a suggestion; "" if all is well.
// CLI11 would only say that an argument was not expected.
std::string unknown_subcommand(const CLI::App& app, const std::vector<std::string>& arguments) {
  const CLI::App* current = &app;
  std::string path = app.get_name();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::vector<std::string> names = subcommand_names(*current);
    if (names.empty()) return "";
    const std::string& word = arguments[i];
    if (word.starts_with('-')) {
      const CLI::Option* option = current->get_option_no_throw(word);
      if (option != nullptr && option->get_items_expected_max() > 0) ++i;
      continue;
    }
    const std::vector<const CLI::App*> matches =
        current->get_subcommands([&word](const CLI::App* sub) { return sub->get_name() == word; });
    const CLI::App* next = matches.empty() ? nullptr : matches.front();
    if (next == nullptr) {
      return fmt::format("'{}' is none of the commands of {} ({}); did you mean '{}'?", word, path,
                         fmt::join(names, ", "), nearest_name(word, names));
    }
    current = next;
    path += " " + word;
  }
  return "";
}

std::string usage_sentence(const CLI::App& app, const CLI::ParseError& error) {
  std::string message = first_line(error.what());
  while (!message.empty() && (message.back() == '.' || message.back() == ' ')) message.pop_back();
  return fmt::format("{}; see {} --help", message, command_path(app));
}

std::unique_ptr<CLI::App> make_app() {
  auto app = std::make_unique<CLI::App>(
      "EFLA, exact-flow linear attention: train, evaluate and use language models.", "efla");
  app->footer("Example:\n  efla generate --model runs/austen/final --prompt \"It was\"");
  app->set_version_flag("--version", "efla " EFLA_VERSION);
  app->require_subcommand(1);
  app->fallthrough();
  app->add_option_function<int>(
         "--threads", [](const int& threads) { at::set_num_threads(threads); },
         "Number of CPU threads (default: all cores)")
      ->check(CLI::Range(1, 1024))
      ->type_name("N");
  add_train(*app);
  add_eval(*app);
  add_generate(*app);
  add_tokenizer(*app);
  add_data(*app);
  add_convert(*app);
  add_bench(*app);
  add_info(*app);
  add_smnist(*app);
  add_flow(*app);
  return app;
}

int run(int argc, char** argv) {
  const std::unique_ptr<CLI::App> app = make_app();
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.empty()) {
    fmt::print(stderr, "{}", app->help());
    return kBadUsage;
  }
  const std::string unknown = unknown_subcommand(*app, arguments);
  if (!unknown.empty()) return report(kBadUsage, unknown);
  try {
    app->parse(argc, argv);
    if (std::fflush(stdout) != 0) throw Error("cannot write to standard output (disk full?)");
    return 0;
  } catch (const CLI::Success& wanted) {  // --help and --version
    return app->exit(wanted);
  } catch (const CLI::ParseError& error) {
    return report(kBadUsage, usage_sentence(*app, error));
  } catch (const UsageError& error) {
    return report(kBadUsage, first_line(error.what()));
  } catch (const c10::Error& error) {
    return report(kFailed, first_line(error.what_without_backtrace()));
  } catch (const std::filesystem::filesystem_error& error) {
    return report(kFailed, fmt::format("{}: {}; check the path and its permissions",
                                       error.path1().string(), error.code().message()));
  } catch (const std::bad_alloc&) {
    return report(kFailed, "not enough memory; use a smaller batch, window or model");
  } catch (const std::exception& error) {
    return report(kFailed, first_line(error.what()));
  }
}

}  // namespace
}  // namespace efla::cli

int main(int argc, char** argv) { return efla::cli::run(argc, argv); }
