#include "efla/io/plot.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>

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

// The data of a curve as a named block: x, y and, where it has a band, the band's two edges.
std::string data_block(const std::string& name, const Curve& curve) {
  std::string block = name + " << END_OF_CURVE\n";
  for (size_t i = 0; i < curve.points.size(); ++i) {
    const auto& [x, y] = curve.points[i];
    if (!std::isfinite(x) || !std::isfinite(y)) {
      block += '\n';
      continue;
    }
    block += fmt::format("{:.9g} {:.9g}", x, y);
    if (i < curve.spread.size()) {
      block += fmt::format(" {:.9g} {:.9g}", y - curve.spread[i], y + curve.spread[i]);
    }
    block += '\n';
  }
  return block + "END_OF_CURVE\n";
}

// Ten colours that are told apart, in curve order.
constexpr const char* kColours[] = {"#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd",
                                    "#8c564b", "#e377c2", "#17becf", "#bcbd22", "#7f7f7f"};

// What follows the data of a curve in gnuplot's plot command.
std::string curve_style(const Curve& curve, size_t index) {
  if (!curve.dotted) {
    return fmt::format("using 1:2 with lines linewidth 2 linecolor rgb \"{}\"",
                       kColours[index % std::size(kColours)]);
  }
  constexpr size_t kDots = 16;  // about
  return fmt::format(
      "using 1:2 every {} with points pointtype 7 pointsize 0.7 linecolor rgb \"black\"",
      std::max<size_t>(1, curve.points.size() / kDots));
}

// The commands that draw one plot whose data blocks are called PREFIX0, PREFIX1, ...
std::string plot_commands(const std::string& prefix, const Plot& plot) {
  std::string commands;
  commands += fmt::format("set title {}\nset xlabel {}\nset ylabel {}\n", quoted(plot.title),
                          quoted(plot.x_label), quoted(plot.y_label));
  // A logarithmic axis would be drawn to the next power of ten.
  commands += plot.log_x ? "set logscale x\nset autoscale xfix\n" : "unset logscale x\n";
  commands += plot.log_y ? "set logscale y\n" : "unset logscale y\n";
  commands += plot.y_low < plot.y_high
                  ? fmt::format("set yrange [{:.9g}:{:.9g}]\n", plot.y_low, plot.y_high)
                  : "set yrange [*:*]\n";
  std::string bands, lines;
  for (size_t i = 0; i < plot.curves.size(); ++i) {
    const Curve& curve = plot.curves[i];
    const std::string data = fmt::format("{}{}", prefix, i);
    if (!curve.spread.empty()) {
      bands += fmt::format(
          "{} using 1:3:4 with filledcurves linecolor rgb \"{}\" fillstyle transparent solid 0.15 "
          "notitle, ",
          data, kColours[i % std::size(kColours)]);
    }
    lines += fmt::format("{}{} {} title {}", i == 0 ? "" : ", ", data, curve_style(curve, i),
                         quoted(curve.title));
  }
  return commands + "plot " + bands + lines + "\n";
}

std::string script_for(const std::string& picture, const std::vector<Plot>& plots) {
  std::string script = "# Draw again with: gnuplot THIS_FILE\n";
  for (size_t p = 0; p < plots.size(); ++p) {
    for (size_t i = 0; i < plots[p].curves.size(); ++i) {
      script += data_block(fmt::format("$curve{}_{}", p, i), plots[p].curves[i]);
    }
  }
  script += plots.size() == 1 ? "set terminal png noenhanced truecolor size 1000,600\n"
                              : fmt::format("set terminal png noenhanced truecolor size {},480\n",
                                            480 * plots.size() + 160);
  script += fmt::format("if (!exists(\"to_stdout\")) set output {}\n", quoted(picture));
  script += "set grid\n";
  if (plots.size() > 1) script += fmt::format("set multiplot layout 1,{}\n", plots.size());
  for (size_t p = 0; p < plots.size(); ++p) {
    const bool last = p + 1 == plots.size();
    if (plots.size() == 1) {
      script += "set key top right\n";
    } else {
      // Every plot is as wide; the last has the legend beside it.
      const double unit = 1.0 / (480 * static_cast<double>(plots.size()) + 160);
      script += fmt::format("set origin {:.6f},0\nset size {:.6f},1\n",
                            480 * static_cast<double>(p) * unit, (last ? 640 : 480) * unit);
      script += last ? "set key outside right top\n" : "set key off\n";
    }
    script += plot_commands(fmt::format("$curve{}_", p), plots[p]);
  }
  return plots.size() > 1 ? script + "unset multiplot\n" : script;
}

bool has_a_point(const Plot& plot) {
  for (const Curve& curve : plot.curves) {
    for (const auto& [x, y] : curve.points) {
      if (std::isfinite(x) && std::isfinite(y)) return true;
    }
  }
  return false;
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
  return draw_plots(png, {plot});
}

bool draw_plots(const std::filesystem::path& png, const std::vector<Plot>& plots) {
  std::filesystem::path script = png;
  script.replace_extension(".gp");
  std::vector<Plot> drawable;  // gnuplot refuses a plot without a single point
  for (const Plot& plot : plots) {
    if (has_a_point(plot)) drawable.push_back(plot);
  }
  if (drawable.empty()) return false;
  write_file_atomically(script, script_for(std::filesystem::absolute(png).string(), drawable));
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
