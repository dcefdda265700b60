#include "efla/nn/presets.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "efla/io/error.h"

namespace efla {
namespace {

// A name that is more than 5 % off would compare models of different sizes.
TEST(Presets, EveryNameIsWithinFivePercentOfItsSize) {
  const std::vector<std::string> names = preset_names();
  EXPECT_EQ(names.size(), 6 * 5);
  for (const std::string& name : names) {
    const ModelConfig config = preset(name);
    EXPECT_NO_THROW(config.validate(name)) << name;
    EXPECT_EQ(name.rfind(config.model_type + "-", 0), 0) << name;
    EXPECT_EQ(config.vocab_size, 32000) << name;
    const auto size = size_in_name(name);
    ASSERT_TRUE(size) << name;
    const double ratio = static_cast<double>(counted_size(config)) / static_cast<double>(*size);
    EXPECT_LT(std::abs(ratio - 1), 0.05) << name << " has " << counted_size(config);
  }
}

// Totals of the published configurations, both embedding tables included.
TEST(Presets, PublishedCountsAreHitExactly) {
  const std::map<std::string, int64_t> exact = {{"delta_net-340m", 374'362'112},
                                                {"delta_net-1.3b", 1'365'677'056},
                                                {"gated_deltanet-1.3b", 1'387'348'732}};
  for (const auto& [name, count] : exact) {
    EXPECT_EQ(preset(name).parameter_count().total(), count) << name;
  }
  const std::map<std::string, double> millions = {{"gated_deltanet-340m", 379.8},
                                                  {"mamba2-340m", 382.4},
                                                  {"mamba2-1.3b", 1371.8},
                                                  {"transformer-340m", 373.9},
                                                  {"transformer-1.3b", 1364.3}};
  for (const auto& [name, count] : millions) {
    EXPECT_NEAR(static_cast<double>(preset(name).parameter_count().total()) / 1e6, count, 0.05)
        << name;
  }
  // EFLA changes the step, not the weights.
  for (const char* size : {"-10m", "-340m", "-1.3b"}) {
    EXPECT_EQ(preset(std::string("efla") + size).parameter_count().total(),
              preset(std::string("delta_net") + size).parameter_count().total());
    EXPECT_EQ(preset(std::string("gated_efla") + size).parameter_count().total(),
              preset(std::string("gated_deltanet") + size).parameter_count().total());
  }
}

// Which the size rule is there to catch: flame's file of that name.
TEST(Presets, TheGatedDeltaNetCalled340MWithSixHeadsIsNotOne) {
  ModelConfig config = preset("gated_deltanet-340m");
  config.num_heads = 6;
  EXPECT_NEAR(static_cast<double>(config.parameter_count().total()) / 1e6, 512.27, 0.005);
  EXPECT_GT(static_cast<double>(counted_size(config)), 1.05 * 340e6);
}

TEST(Presets, UnknownNamesAreRefusedWithTheKnownOnes) {
  for (const char* name : {"efla", "efla-341m", "mamba-340m", "", "340m", "efla-340m "}) {
    try {
      preset(name, "r.toml:3");
      FAIL() << name;
    } catch (const UsageError& error) {
      const std::string said = error.what();
      EXPECT_EQ(said.find("r.toml:3: no preset is called"), 0u) << said;
      EXPECT_NE(said.find("gated_deltanet"), std::string::npos) << said;
      EXPECT_NE(said.find("1.3b"), std::string::npos) << said;
    }
  }
  EXPECT_EQ(preset("EFLA-340M").to_json(), preset("efla-340m").to_json());
  EXPECT_TRUE(is_preset("EFLA-340M"));
  EXPECT_FALSE(is_preset("efla-341m"));
}

TEST(Presets, SizesInNames) {
  EXPECT_EQ(size_in_name("340m"), 340'000'000);
  EXPECT_EQ(size_in_name("delta_net_1.3B"), 1'300'000'000);
  EXPECT_EQ(size_in_name("efla-10M"), 10'000'000);
  for (const char* none : {"", "m", "x", "team", "v2m", "0m", ".m", "efla-", "340", "-.5b"}) {
    EXPECT_FALSE(size_in_name(none)) << none;
  }
}

}  // namespace
}  // namespace efla
