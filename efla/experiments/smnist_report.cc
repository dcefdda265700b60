#include "efla/experiments/smnist_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>

#include "efla/experiments/arms.h"
#include "efla/experiments/smnist_setting.h"
#include "efla/io/error.h"
#include "efla/io/plot.h"

namespace efla {
namespace {

constexpr const char* kSuites[] = {"intensity", "noise", "dropout"};

// First minus second tells apart what the paper changes at once: everything; the step alone; the
// values' scale alone; the gate's dependence on |k| alone; then the step with raw keys.
constexpr const char* kPairs[][2] = {
    {"efla", "deltanet"},        {"efla_unit", "deltanet"}, {"deltanet_scaled", "deltanet"},
    {"efla", "deltanet_scaled"}, {"efla", "euler_raw"},     {"efla", "rk4"}};

struct Run {
  RunSpec spec;
  double clean = 0, loss = 0;  // loss: infinite where the run diverged
  std::map<std::string, std::vector<double>> suites;

  // Mean over the levels that change the images: all but the neutral first.
  double corrupted(const std::string& suite) const {
    const std::vector<double>& levels = suites.at(suite);
    if (levels.size() < 2) return NAN;
    return std::accumulate(levels.begin() + 1, levels.end(), 0.0) /
           static_cast<double>(levels.size() - 1);
  }
};

struct Results {
  std::vector<Run> runs;
  std::map<std::string, std::vector<double>> levels;  // by suite
  std::set<double> rates;

  std::vector<const Run*> of(const std::string& arm, double rate) const {
    std::vector<const Run*> found;
    for (const Run& run : runs) {
      if (run.spec.arm == arm && run.spec.learning_rate == rate) found.push_back(&run);
    }
    return found;
  }

  Spread over(const std::string& arm, double rate, const auto& value) const {
    std::vector<double> values;
    for (const Run* run : of(arm, rate)) values.push_back(value(*run));
    return spread_of(values);
  }

  // The rate of the lowest mean loss; none where no rate has a run that kept finite.
  std::optional<double> best_rate(const std::string& arm) const {
    std::optional<double> best;
    double lowest = std::numeric_limits<double>::infinity();
    for (const double rate : rates) {
      const Spread loss = over(arm, rate, [](const Run& run) { return run.loss; });
      if (loss.count > 0 && loss.mean < lowest) {
        lowest = loss.mean;
        best = rate;
      }
    }
    return best;
  }
};

Results parse(const std::vector<nlohmann::json>& lines, const std::string& file) {
  Results results;
  for (size_t i = 0; i < lines.size(); ++i) {
    const nlohmann::json& line = lines[i];
    try {
      Run run{spec_of(line), line.at("clean").get<double>(), 0, {}};
      const bool diverged = line.at("diverged").get<bool>();
      run.loss =
          diverged ? std::numeric_limits<double>::infinity() : line.at("final_loss").get<double>();
      for (const char* suite : kSuites) {
        run.suites[suite] = line.at(suite).get<std::vector<double>>();
        results.levels[suite] = line.at("setting").at(suite).get<std::vector<double>>();
        if (run.suites[suite].size() != results.levels[suite].size()) {
          throw Error(fmt::format("{} line {}: {} accuracies for {} levels of {}; remove the line",
                                  file, i + 1, run.suites[suite].size(),
                                  results.levels[suite].size(), suite));
        }
      }
      results.rates.insert(run.spec.learning_rate);
      results.runs.push_back(std::move(run));
    } catch (const nlohmann::json::exception& error) {
      throw Error(fmt::format("{} line {}: no run of this study ({}); remove the line", file, i + 1,
                              error.what()));
    }
  }
  return results;
}

std::vector<const Arm*> arms_in(const Results& results) {
  std::vector<const Arm*> arms;
  for (const Arm& arm : all_arms()) {
    const auto is_of = [&](const Run& run) { return run.spec.arm == arm.name; };
    if (std::any_of(results.runs.begin(), results.runs.end(), is_of)) arms.push_back(&arm);
  }
  return arms;
}

std::string percent(const Spread& spread) {
  if (spread.count == 0 || std::isnan(spread.mean)) return "-";
  if (std::isnan(spread.sd)) return fmt::format("{:.1f}", 100 * spread.mean);
  return fmt::format("{:.1f} ± {:.1f}", 100 * spread.mean, 100 * spread.sd);
}

std::string rule_of(size_t columns) {
  std::string line = "|";
  for (size_t i = 0; i < columns; ++i) line += "---|";
  return line + "\n";
}

// One row per arm, one column per rate.
std::string rate_table(const Results& results, const std::string& title, const auto& value) {
  std::string text = "### " + title + "\n\n| arm |";
  for (const double rate : results.rates) text += fmt::format(" {:g} |", rate);
  text += "\n" + rule_of(results.rates.size() + 1);
  for (const Arm* arm : arms_in(results)) {
    text += fmt::format("| {} |", arm->title);
    for (const double rate : results.rates) {
      text += " " + percent(results.over(arm->name, rate, value));
      int64_t diverged = 0;
      for (const Run* run : results.of(arm->name, rate)) diverged += std::isinf(run->loss) ? 1 : 0;
      text += diverged > 0 ? fmt::format(" ({} diverged) |", diverged) : " |";
    }
    text += '\n';
  }
  return text + "\n";
}

std::string best_table(const Results& results) {
  std::string text =
      "### Each arm at its best rate\n\n| arm | rate | seeds | loss | clean | intensity | noise | "
      "dropout |\n" +
      rule_of(8);
  for (const Arm* arm : arms_in(results)) {
    const std::optional<double> rate = results.best_rate(arm->name);
    if (!rate) {
      text += fmt::format("| {} | all diverged | - | - | - | - | - | - |\n", arm->title);
      continue;
    }
    const Spread loss = results.over(arm->name, *rate, [](const Run& run) { return run.loss; });
    text += fmt::format(
        "| {} | {:g} | {} | {:.4f} | {} |", arm->title, *rate, loss.count, loss.mean,
        percent(results.over(arm->name, *rate, [](const Run& run) { return run.clean; })));
    for (const char* suite : kSuites) {
      text += fmt::format(" {} |", percent(results.over(arm->name, *rate, [&](const Run& run) {
                            return run.corrupted(suite);
                          })));
    }
    text += '\n';
  }
  return text + "\n";
}

std::string released_table(const Results& results) {
  std::string rows;
  for (const RunSpec& spec : released_runs()) {
    for (const Run& run : results.runs) {
      if (!(run.spec == spec)) continue;
      rows += fmt::format("| {} | {:g} | {} | {:.1f} | {:.1f} | {:.1f} | {:.1f} |\n",
                          arm_named(spec.arm).title, spec.learning_rate, spec.seed, 100 * run.clean,
                          100 * run.corrupted("intensity"), 100 * run.corrupted("noise"),
                          100 * run.corrupted("dropout"));
    }
  }
  if (std::count(rows.begin(), rows.end(), '\n') < 2) return "";
  return "### The released script's pair: unequal rates, one seed each\n\n| arm | rate | seed | "
         "clean | intensity | noise | dropout |\n" +
         rule_of(7) + rows + "\n";
}

// Mean and deviation of first minus second over the seeds that both have at one rate, in points,
// and how many of the differences are above zero. Runs that diverged are left out with their
// partners.
std::string difference(const Results& results, const char* const (&pair)[2], double rate,
                       const auto& value) {
  std::vector<double> differences;
  for (const Run* a : results.of(pair[0], rate)) {
    for (const Run* b : results.of(pair[1], rate)) {
      if (a->spec.seed != b->spec.seed || std::isinf(a->loss) || std::isinf(b->loss)) continue;
      differences.push_back(100 * (value(*a) - value(*b)));
    }
  }
  const Spread spread = spread_of(differences);
  if (spread.count < 2 || std::isnan(spread.mean)) return "-";
  const auto above = std::count_if(differences.begin(), differences.end(),
                                   [](double points) { return points > 0; });
  return fmt::format("{:+.1f} ± {:.1f} ({}/{})", spread.mean, spread.sd, above, spread.count);
}

// What two arms differ by where rate, seed, batches and first values are the same.
std::string paired_table(const Results& results) {
  std::string rows;
  const auto add_row = [&](const char* const(&pair)[2], const std::string& of, const auto& value) {
    std::string cells;
    bool any = false;
    for (const double rate : results.rates) {
      const std::string cell = difference(results, pair, rate, value);
      any = any || cell != "-";
      cells += " " + cell + " |";
    }
    if (!any) return;
    rows += fmt::format("| {} - {} | {} |{}\n", arm_named(pair[0]).title, arm_named(pair[1]).title,
                        of, cells);
  };
  for (const auto& pair : kPairs) {
    add_row(pair, "clean", [](const Run& run) { return run.clean; });
    for (const char* suite : kSuites) {
      add_row(pair, suite, [&](const Run& run) { return run.corrupted(suite); });
    }
  }
  if (rows.empty()) return "";
  std::string text =
      "### Differences at one rate and seed, points (of how many seeds the first is ahead)\n\n"
      "| arms | accuracy |";
  for (const double rate : results.rates) text += fmt::format(" {:g} |", rate);
  return text + "\n" + rule_of(results.rates.size() + 2) + rows + "\n";
}

// Accuracy in percent against each level, every arm at its best rate.
Plot corruption_plot(const Results& results, const std::string& suite, const std::string& x_label) {
  Plot plot{"", x_label, "test accuracy, %", {}};
  plot.y_high = 100;
  for (const Arm* arm : arms_in(results)) {
    Curve curve{arm->title, {}};
    const double rate = results.best_rate(arm->name).value_or(*results.rates.begin());
    const std::vector<double>& levels = results.levels.at(suite);
    for (size_t i = 0; i < levels.size(); ++i) {
      const Spread spread =
          results.over(arm->name, rate, [&](const Run& run) { return run.suites.at(suite)[i]; });
      curve.points.emplace_back(levels[i], 100 * spread.mean);
      curve.spread.push_back(std::isnan(spread.sd) ? 0 : 100 * spread.sd);
    }
    plot.curves.push_back(std::move(curve));
  }
  return plot;
}

Plot rate_plot(const Results& results, const std::string& title, const auto& value) {
  Plot plot{title, "learning rate", "test accuracy, %", {}};
  plot.log_x = true;
  plot.y_high = 100;
  for (const Arm* arm : arms_in(results)) {
    Curve curve{arm->title, {}};
    for (const double rate : results.rates) {
      const Spread spread = results.over(arm->name, rate, value);
      curve.points.emplace_back(rate, spread.count > 0 ? 100 * spread.mean : NAN);
      curve.spread.push_back(std::isnan(spread.sd) ? 0 : 100 * spread.sd);
    }
    plot.curves.push_back(std::move(curve));
  }
  return plot;
}

}  // namespace

Spread spread_of(const std::vector<double>& values) {
  Spread spread{NAN, NAN, static_cast<int64_t>(values.size())};
  if (values.empty()) return spread;
  const auto count = static_cast<double>(values.size());
  spread.mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
  if (values.size() < 2) return spread;
  double squares = 0;
  for (const double value : values) squares += (value - spread.mean) * (value - spread.mean);
  spread.sd = std::sqrt(squares / (count - 1));
  return spread;
}

std::string smnist_tables(const std::vector<nlohmann::json>& lines, const std::string& file) {
  const Results results = parse(lines, file);
  if (results.runs.empty()) return "";
  std::string text = rate_table(results, "Clean test accuracy by learning rate, %",
                                [](const Run& run) { return run.clean; });
  for (const char* suite : kSuites) {
    text += rate_table(results, fmt::format("Accuracy under {} by learning rate, %", suite),
                       [&](const Run& run) { return run.corrupted(suite); });
  }
  return text + best_table(results) + paired_table(results) + released_table(results);
}

std::vector<std::filesystem::path> draw_smnist(const std::filesystem::path& folder,
                                               const std::vector<nlohmann::json>& lines,
                                               const std::string& file) {
  const Results results = parse(lines, file);
  std::vector<std::filesystem::path> pictures;
  if (results.runs.empty()) return pictures;
  const auto draw = [&](const char* name, const std::vector<Plot>& plots) {
    if (draw_plots(folder / name, plots)) pictures.push_back(folder / name);
  };
  draw("corruptions.png", {corruption_plot(results, "intensity", "intensity times"),
                           corruption_plot(results, "noise", "standard deviation of the noise"),
                           corruption_plot(results, "dropout", "probability of a dropped pixel")});
  std::vector<Plot> by_rate = {
      rate_plot(results, "clean", [](const Run& run) { return run.clean; })};
  for (const char* suite : kSuites) {
    by_rate.push_back(
        rate_plot(results, suite, [&](const Run& run) { return run.corrupted(suite); }));
  }
  draw("rates.png", by_rate);
  return pictures;
}

}  // namespace efla
