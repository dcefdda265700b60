// Tables and pictures over the results file of a sequential-image study.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace efla {

/// Mean and sample standard deviation over seeds, the latter NaN for a single one.
struct Spread {
  double mean = 0, sd = 0;
  int64_t count = 0;
};
Spread spread_of(const std::vector<double>& values);

/// The tables as Markdown: accuracy at every learning rate, clean and over the corruptions; every
/// arm at its best rate, which is the one of the lowest training loss over the last tenth of the
/// steps (in a single epoch every batch is new to the model, and the test images stay unused); and,
/// where both runs are there, the released script's pair. Throws Error naming the line of `file`
/// that is no run.
std::string smnist_tables(const std::vector<nlohmann::json>& lines, const std::string& file);

/// Draws corruptions.png (accuracy against each corruption, every arm at its best rate) and
/// rates.png (accuracy and corrupted accuracy against the learning rate) into `folder`, with bands
/// of one standard deviation. Returns the pictures drawn.
std::vector<std::filesystem::path> draw_smnist(const std::filesystem::path& folder,
                                               const std::vector<nlohmann::json>& lines,
                                               const std::string& file);

}  // namespace efla
