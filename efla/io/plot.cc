#include "efla/io/plot.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>

#include "efla/io/atomic_file.h"
#include "efla/io/log.h"

namespace efla {
namespace {

// Text between double quotes of gnuplot's language.
std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c == '\n' ? ' ' : c;
  }
  return result + "\"";
}

std::string script_for(const std::string& picture, const Plot& plot) {
  std::string script = "# Draw again with: gnuplot THIS_FILE\n";
  std::string commands;
  for (size_t i = 0; i < plot.curves.size(); ++i) {
    script += fmt::format("$curve{} << END_OF_CURVE\n", i);
    for (const auto& [x, y] : plot.curves[i].points) {
      script += std::isfinite(x) && std::isfinite(y) ? fmt::format("{:.9g} {:.9g}\n", x, y) : "\n";
    }
    script += "END_OF_CURVE\n";
    commands += fmt::format("{}$curve{} using 1:2 with lines linewidth 2 title {}",
                            i == 0 ? "" : ", ", i, quoted(plot.curves[i].title));
  }
  script += "set terminal png noenhanced size 1000,600\n";
  script += fmt::format("if (!exists(\"to_stdout\")) set output {}\n", quoted(picture));
  script += fmt::format("set title {}\nset xlabel {}\nset ylabel {}\n", quoted(plot.title),
                        quoted(plot.x_label), quoted(plot.y_label));
  script += "set grid\nset key top right\n";
  if (plot.log_x) script += "set logscale x\n";
  if (plot.log_y) script += "set logscale y\n";
  return script + "plot " + commands + "\n";
}

// Runs gnuplot on the script without a shell, silently, its picture written over the existing file
// `picture`; false when gnuplot is missing or fails. gnuplot gets no name, so that one that
// outlives us makes no new file.
bool run_gnuplot(const std::string& script, const std::string& picture) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, picture.c_str(), O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  std::string program = "gnuplot", option = "-e", argument = script;
  std::string command = "to_stdout = 1";
  char* arguments[] = {program.data(), option.data(), command.data(), argument.data(), nullptr};
  pid_t child = 0;
  const int error = ::posix_spawnp(&child, "gnuplot", &actions, nullptr, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return false;
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

bool draw_plot(const std::filesystem::path& png, const Plot& plot) {
  std::filesystem::path script = png;
  script.replace_extension(".gp");
  // gnuplot refuses a plot without a single point.
  bool any = false;
  for (const Curve& curve : plot.curves) {
    for (const auto& [x, y] : curve.points) any = any || (std::isfinite(x) && std::isfinite(y));
  }
  if (!any) return false;
  write_file_atomically(script, script_for(std::filesystem::absolute(png).string(), plot));
  // Under another name first: a failing gnuplot leaves an empty or half-drawn file.
  AtomicFileWriter drawn(png);
  if (run_gnuplot(script.string(), drawn.temporary().string())) {
    drawn.commit();
    return true;
  }
  static std::atomic<bool> warned{false};
  if (!warned.exchange(true)) {
    log_warning(fmt::format(
        "no picture at {}: gnuplot is missing or failed; install gnuplot-nox and run `gnuplot {}`",
        png.string(), script.string()));
  }
  return false;
}

}  // namespace efla
