#include "efla/train/recipe.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "efla/io/error.h"
#include "efla/nn/presets.h"
#include "efla/train/nearest_name.h"

namespace efla {
namespace {

const std::string kSmallest = R"([data]
train = "shards"
[train]
out = "runs/a"
steps = 10
)";

std::string error_of(const std::string& text, const std::vector<std::string>& overrides = {}) {
  try {
    Recipe::parse(text, "r.toml", overrides);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Recipe, SectionsReachTheirFields) {
  const Recipe recipe = Recipe::parse(R"(
[model]
hidden_size = 64
num_heads = 2
num_hidden_layers = 3
rule = "euler"
qk_norm = "l2"
hidden_ratio = 2
[data]
train = "a b"
valid = "c"
tokenizer = "byte"
length = 128
batch = 4
[optimizer]
learning_rate = 1e-3
weight_decay = 0
[schedule]
warmup_steps = 5
floor = 0.2
[train]
out = "o"
tokens = 1e6
clip = 0.5
)",
                                      "r.toml");
  EXPECT_EQ(recipe.model.hidden_size, 64);
  EXPECT_EQ(recipe.model.rule, Rule::kEuler);
  EXPECT_EQ(recipe.model.qk_norm, QkNorm::kL2);
  EXPECT_EQ(recipe.model.hidden_ratio, 2.0);
  EXPECT_EQ(recipe.data.train, "a b");
  EXPECT_EQ(recipe.data.length, 128);
  EXPECT_EQ(recipe.optimizer.learning_rate, 1e-3);
  EXPECT_EQ(recipe.optimizer.weight_decay, 0);
  EXPECT_EQ(recipe.schedule.warmup_steps, 5);
  EXPECT_EQ(recipe.train.tokens, 1000000);
  EXPECT_EQ(recipe.train.clip, 0.5);
  EXPECT_EQ(recipe.total_steps(), 1954);  // ceil(1e6 / 512)
}

TEST(Recipe, OverridesWinAndTakeBareStrings) {
  const Recipe recipe =
      Recipe::parse(kSmallest, "r.toml",
                    {"train.steps=20", "train.steps=30", "data.train=some/folder", "train.out=2024",
                     "data.valid=\"quoted\"", "model.rule=rk4", "optimizer.learning_rate=2e-4",
                     "model.tie_word_embeddings=true", "data.tokenizer=a=b.model"});
  EXPECT_EQ(recipe.train.steps, 30);
  EXPECT_EQ(recipe.data.train, "some/folder");
  EXPECT_EQ(recipe.train.out, "2024");
  EXPECT_EQ(recipe.data.valid, "quoted");
  EXPECT_EQ(recipe.model.rule, Rule::kRk4);
  EXPECT_EQ(recipe.optimizer.learning_rate, 2e-4);
  EXPECT_TRUE(recipe.model.tie_word_embeddings);
  EXPECT_EQ(recipe.data.tokenizer, "a=b.model");
}

struct BadRecipe {
  std::string text;  // replaces or extends kSmallest; lines count from 1
  std::vector<std::string> overrides;
  std::vector<std::string> expected;  // parts of the message
};

TEST(Recipe, RefusesWithKeyValuePlaceAndExpectation) {
  const std::vector<BadRecipe> table = {
      // Unknown names, with the nearest known one.
      {kSmallest + "stepz = 3\n", {}, {"r.toml:6", "'train.stepz'", "'train.steps'"}},
      {kSmallest + "[modle]\nhidden_size = 3\n", {}, {"r.toml:7", "'model.hidden_size'"}},
      {kSmallest + "[model]\nhiden_size = 3\n", {}, {"'model.hidden_size'"}},
      {"steps = 3\n" + kSmallest, {}, {"r.toml:1", "'steps'", "'train.steps'"}},
      {kSmallest, {"steps=3"}, {"the command line", "'train.steps'"}},
      {kSmallest, {"train.kepe=3"}, {"'train.keep'"}},
      {kSmallest, {"train=3"}, {"'train' is a section"}},
      {kSmallest + "[nothing]\n", {}, {"r.toml:6", "'nothing'"}},
      // Wrong types.
      {kSmallest + "keep = \"two\"\n", {}, {"r.toml:6", "train.keep = \"two\"", "an integer"}},
      {kSmallest + "keep = 1.5\n", {}, {"train.keep = 1.5", "an integer"}},
      {kSmallest + "keep = [1]\n", {}, {"train.keep = [1]", "an integer"}},
      {kSmallest + "keep = 2020-01-01\n", {}, {"train.keep", "an integer"}},
      {kSmallest + "clip = true\n", {}, {"train.clip = true", "a number"}},
      {kSmallest + "dtype = 16\n", {}, {"train.dtype = 16", "a string"}},
      {kSmallest, {"train.keep=two"}, {"the command line", "train.keep = two", "an integer"}},
      {kSmallest + "[model]\nhidden_size = \"big\"\n", {}, {"r.toml:7", "model.hidden_size"}},
      {kSmallest + "[model]\nuse_gate = 1\n", {}, {"model.use_gate = 1", "true or false"}},
      {kSmallest + "[model]\nhidden_size = 1e2\n", {}, {"model.hidden_size", "an integer"}},
      // Negative, absurd and not finite values.
      {kSmallest + "seed = -1\n", {}, {"train.seed = -1", "from 0"}},
      {kSmallest, {"data.length=0"}, {"data.length = 0"}},
      {kSmallest, {"data.batch=-4"}, {"data.batch = -4", "from 1"}},
      {kSmallest, {"data.batch=99999999999999999999"}, {"data.batch = 99999999999999999999"}},
      {kSmallest, {"optimizer.learning_rate=nan"}, {"optimizer.learning_rate = nan"}},
      {kSmallest, {"optimizer.learning_rate=1000"}, {"optimizer.learning_rate = 1000"}},
      {kSmallest, {"optimizer.beta2=1"}, {"optimizer.beta2 = 1"}},
      {kSmallest, {"train.dtype=float8"}, {"train.dtype = float8", "float32"}},
      {kSmallest, {"model.hidden_size=-64"}, {"model.hidden_size = -64"}},
      {kSmallest, {"model.num_hidden_layers=1000000000000"}, {"model.num_hidden_layers"}},
      {kSmallest, {"model.num_heads=0"}, {"num_heads"}},
      {kSmallest, {"model.rule=magic"}, {"rule", "magic", "exact"}},
      // What does not fit together or is missing.
      {kSmallest, {"schedule.warmup_steps=11"}, {"warmup_steps = 11", "10 steps"}},
      {kSmallest, {"train.tokens=100"}, {"train.steps or train.tokens"}},
      {"[train]\nsteps = 1\nout = \"o\"\n", {}, {"data.train"}},
      {"[train]\nsteps = 1\n[data]\ntrain = \"o\"\n", {}, {"train.out"}},
      // Not TOML, not an override.
      {"[train\n", {}, {"r.toml:1", "not valid TOML"}},
      {kSmallest + "steps = 4\n", {}, {"r.toml:6", "not valid TOML"}},
      {kSmallest, {"steps"}, {"'steps' is not an override", "section.key=value"}},
      {kSmallest, {"=3"}, {"is not an override"}},
      {"", {}, {"data.train"}},
  };
  for (const BadRecipe& bad : table) {
    const std::string message = error_of(bad.text, bad.overrides);
    for (const std::string& part : bad.expected) {
      EXPECT_NE(message.find(part), std::string::npos) << "wanted " << part << " in: " << message;
    }
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
}

TEST(Recipe, MissingFileAndFolderAreUsageErrors) {
  EXPECT_THROW(Recipe::load("/nonexistent/recipe.toml"), UsageError);
  EXPECT_THROW(Recipe::load(testing::TempDir()), UsageError);
}

TEST(Recipe, ResolvedTextReadsBackToTheSameRecipe) {
  Recipe recipe = Recipe::parse(kSmallest, "r.toml",
                                {"optimizer.learning_rate=0.1", "optimizer.eps=1e-15",
                                 "data.valid=\"with \\\"quotes\\\" and \\\\ é\"",
                                 "model.hidden_size=64", "model.num_heads=2", "model.rule=rk2"});
  recipe.model.bos_token_id.reset();
  const Recipe again = Recipe::parse(recipe.to_toml(), "again.toml");
  EXPECT_EQ(again.settings(), recipe.settings());
  EXPECT_EQ(again.data.valid, "with \"quotes\" and \\ é");
  EXPECT_EQ(again.optimizer.learning_rate, 0.1);
  EXPECT_FALSE(again.model.bos_token_id.has_value());
  EXPECT_EQ(recipe_hash(again), recipe_hash(recipe));
}

TEST(Recipe, EveryPresetIsAModelAndReadsBack) {
  for (const std::string& name : preset_names()) {
    const Recipe recipe =
        Recipe::parse(kSmallest, "r.toml", {"model.preset=" + name, "model.vocab_size=512"});
    ModelConfig expected = preset(name);
    expected.vocab_size = 512;
    EXPECT_EQ(recipe.model.to_json(), expected.to_json()) << name;
    EXPECT_TRUE(recipe.given_model_keys.count("vocab_size"));
    EXPECT_FALSE(recipe.given_model_keys.count("eos_token_id"));
    const Recipe again = Recipe::parse(recipe.to_toml(), "again.toml");
    EXPECT_EQ(again.settings(), recipe.settings()) << name;
    EXPECT_EQ(again.model.to_json(), recipe.model.to_json()) << name;
  }
}

TEST(Recipe, KeysChangeAPreset) {
  const Recipe recipe = Recipe::parse(
      "[model]\npreset = \"mamba2-10m\"\nnum_hidden_layers = 5\n" + kSmallest, "r.toml",
      {"model.preset=gated_efla-10m", "model.rule=exact_log", "model.attn.layers=[1, 3]",
       "model.attn.num_heads=4"});
  ModelConfig expected = preset("gated_efla-10m");
  expected.num_hidden_layers = 5;
  expected.rule = Rule::kExactLog;
  expected.attn = AttentionConfig();
  expected.attn->layers = {1, 3};
  expected.attn->num_heads = 4;
  EXPECT_EQ(recipe.model.to_json(), expected.to_json());
}

TEST(Recipe, HybridsAndMamba2HaveTheirKeys) {
  const Recipe hybrid = Recipe::parse(kSmallest + R"([model]
model_type = "gated_deltanet"
hidden_size = 64
num_hidden_layers = 4
head_dim = 16
[model.attn]
layers = [1, 3]
num_heads = 4
)",
                                      "r.toml", {"model.attn.window_size=32"});
  ASSERT_TRUE(hybrid.model.attn);
  EXPECT_EQ(hybrid.model.attn->layers, (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(hybrid.model.attn->window_size, 32);
  EXPECT_EQ(hybrid.model.rule, Rule::kEuler);
  EXPECT_EQ(Recipe::parse(hybrid.to_toml(), "again.toml").settings(), hybrid.settings());

  const Recipe mamba2 = Recipe::parse(kSmallest + R"([model]
preset = "mamba2-10m"
hidden_size = 64
dt_limit = [0.01, inf]
A_init_range = [1, 8]
head_dim = 32
)",
                                      "r.toml");
  EXPECT_EQ(mamba2.model.mamba2_heads(), 4);
  EXPECT_EQ(mamba2.model.mamba2.dt_limit_low, 0.01);
  EXPECT_EQ(mamba2.model.mamba2.a_init_high, 8);
  const Recipe again = Recipe::parse(mamba2.to_toml(), "again.toml");
  EXPECT_EQ(again.model.to_json(), mamba2.model.to_json());
}

TEST(Recipe, RefusesFamiliesAndPresetsThatDoNotFit) {
  const std::vector<BadRecipe> table = {
      {kSmallest, {"model.model_type=rwkv7"}, {"r.toml: [model]: model_type must be one of efla"}},
      {kSmallest, {"model.model_type=\"3\""}, {"model_type must be one of"}},
      {kSmallest + "[model]\nmodel_type = 3\n", {}, {"r.toml:7", "model.model_type", "a string"}},
      {kSmallest + "[model]\npreset = 340\n", {}, {"r.toml:7", "model.preset = 340", "a string"}},
      {kSmallest + "[model]\npreset = \"efla-341m\"\n",
       {},
       {"r.toml:7: model.preset", "efla-341m"}},
      {kSmallest,
       {"model.preset=efla-10m", "model.model_type=delta_net"},
       {"model.model_type = delta_net must be \"efla\", the family of the preset"}},
      {kSmallest,
       {"model.model_type=mamba2", "model.expand_v=2"},
       {"unknown key 'model.expand_v'"}},
      {kSmallest,
       {"model.model_type=mamba2", "model.dt_limit=3"},
       {"model.dt_limit = 3", "an array"}},
      {kSmallest, {"model.model_type=mamba2", "model.dt_limit=[3]"}, {"dt_limit", "two numbers"}},
      {kSmallest, {"model.head_dim=64"}, {"unknown key 'model.head_dim'"}},
      {kSmallest, {"model.model_type=delta_net", "model.rule=exact"}, {"rule must be euler"}},
      {kSmallest, {"model.attn.layers=[1]"}, {"attn: num_heads must be given"}},
      {kSmallest, {"model.attn.layers=3"}, {"model.attn.layers = 3", "an array"}},
      {kSmallest,
       {"model.attn.layers=[\"a\"]", "model.attn.num_heads=16"},
       {"layers", "an integer"}},
      {kSmallest, {"model.attn.heads=3"}, {"unknown key 'model.attn.heads'"}},
      {kSmallest, {"model.attn=3"}, {"unknown key 'model.attn'"}},
  };
  for (const BadRecipe& bad : table) {
    const std::string message = error_of(bad.text, bad.overrides);
    for (const std::string& part : bad.expected) {
      EXPECT_NE(message.find(part), std::string::npos) << "wanted " << part << " in: " << message;
    }
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
}

TEST(Recipe, HashCoversWhatDecidesTheLossesOnly) {
  const auto hash = [](const std::string& override_text) {
    return recipe_hash(Recipe::parse(kSmallest, "r.toml", {override_text}));
  };
  const std::string base = hash("train.steps=10");
  for (const char* same :
       {"train.out=x", "train.keep=9", "train.threads=3", "train.eval_interval=7",
        "train.checkpoint_interval=3", "train.time_limit=5", "data.verify=false"}) {
    EXPECT_EQ(hash(same), base) << same;
  }
  for (const char* other : {"train.seed=1", "train.clip=0.5", "data.batch=2", "model.rule=euler",
                            "train.steps=11", "optimizer.beta1=0.8", "schedule.floor=0"}) {
    EXPECT_NE(hash(other), base) << other;
  }
}

TEST(Recipe, ShippedRecipesAreValid) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(EFLA_SOURCE_DIR "/configs")) {
    if (entry.path().extension() != ".toml") continue;
    EXPECT_NO_THROW(Recipe::load(entry.path().string())) << entry.path();
    ++count;
  }
  EXPECT_GE(count, 2);
}

TEST(NearestName, CountsEditsAndSwaps) {
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(edit_distance("abdc", "abcd"), 1);
  EXPECT_EQ(edit_distance("same", "same"), 0);
  EXPECT_EQ(nearest_name("train.sede", {"train.steps", "train.seed", "data.batch"}), "train.seed");
  EXPECT_EQ(nearest_name("batch", {"train.steps", "data.batch"}), "data.batch");
  // The same last part in two sections: the whole name decides.
  EXPECT_EQ(nearest_name("dta.train", {"model.train", "data.train"}), "data.train");
}

}  // namespace
}  // namespace efla
