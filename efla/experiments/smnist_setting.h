// What a run of the sequential-image study is: the setting that all runs of a study share, and the
// arm, learning rate and seed that tell its runs apart.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace efla {

struct SmnistSetting {
  std::string train_data, test_data;  // fingerprints of the files
  int64_t train_images = 0, test_images = 0;
  int64_t side = 28;  // after shrinking
  bool permuted = false;
  int64_t batch = 128;
  int64_t steps = 469;  // in total; the last batch of an epoch is short
  int64_t layers = 1, width = 64, heads = 1;
  std::vector<double> intensity{1, 2, 3, 4, 5, 6, 7, 8, 9, 10};           // factors
  std::vector<double> noise{0, .1, .2, .3, .4, .5, .6, .7, .8, .9, 1};    // standard deviations
  std::vector<double> dropout{0, .1, .2, .3, .4, .5, .6, .7, .8, .9, 1};  // probabilities

  nlohmann::ordered_json to_json() const;
};

struct RunSpec {
  std::string arm;
  double learning_rate = 1e-3;
  uint64_t seed = 0;

  bool operator==(const RunSpec&) const = default;
  std::string text() const;  ///< "efla, learning rate 0.003, seed 44"
};

/// The spec of a line of the results file. Throws nlohmann::json::exception.
RunSpec spec_of(const nlohmann::json& line);

/// The whole grid, arm by arm within a seed and a learning rate, so that a study cut short compares
/// as many arms as it can.
std::vector<RunSpec> run_grid(const std::vector<std::string>& arms,
                              const std::vector<double>& learning_rates,
                              const std::vector<uint64_t>& seeds);

/// The released script's two runs: other learning rates and seeds for the two arms.
std::vector<RunSpec> released_runs();

/// The results file of a study's folder.
std::filesystem::path results_file(const std::filesystem::path& out);

}  // namespace efla
