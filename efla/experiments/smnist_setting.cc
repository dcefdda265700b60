#include "efla/experiments/smnist_setting.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace efla {

nlohmann::ordered_json SmnistSetting::to_json() const {
  return {{"train_data", train_data},
          {"test_data", test_data},
          {"train_images", train_images},
          {"test_images", test_images},
          {"side", side},
          {"permuted", permuted},
          {"batch", batch},
          {"steps", steps},
          {"layers", layers},
          {"width", width},
          {"heads", heads},
          {"intensity", intensity},
          {"noise", noise},
          {"dropout", dropout}};
}

std::string RunSpec::text() const {
  return fmt::format("{}, learning rate {:g}, seed {}", arm, learning_rate, seed);
}

RunSpec spec_of(const nlohmann::json& line) {
  return {line.at("arm").get<std::string>(), line.at("learning_rate").get<double>(),
          line.at("seed").get<uint64_t>()};
}

std::vector<RunSpec> run_grid(const std::vector<std::string>& arms,
                              const std::vector<double>& learning_rates,
                              const std::vector<uint64_t>& seeds) {
  std::vector<RunSpec> runs;
  for (const uint64_t seed : seeds) {
    for (const double rate : learning_rates) {
      for (const std::string& arm : arms) runs.push_back({arm, rate, seed});
    }
  }
  return runs;
}

std::vector<RunSpec> released_runs() { return {{"deltanet", 1e-3, 43}, {"efla", 3e-3, 44}}; }

std::filesystem::path results_file(const std::filesystem::path& out) { return out / "runs.jsonl"; }

}  // namespace efla
