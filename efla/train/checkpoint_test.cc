#include "efla/train/checkpoint.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "efla/io/atomic_file.h"
#include "efla/io/checksum.h"
#include "efla/io/error.h"
#include "efla/nn/pretrained.h"

namespace efla {
namespace {

namespace fs = std::filesystem;

ModelConfig small_config() {
  ModelConfig config;
  config.vocab_size = 11;
  config.hidden_size = 8;
  config.num_heads = 1;
  config.num_hidden_layers = 1;
  config.intermediate_size = 8;
  return config;
}

NamedTensors parameters_of(const LanguageModel& model) {
  NamedTensors parameters;
  for (const auto& item : model->named_parameters())
    parameters.emplace_back(item.key(), item.value());
  return parameters;
}

class CheckpointTest : public testing::Test {
 protected:
  CheckpointTest()
      : folder_(fmt::format("{}efla_checkpoint_{}", testing::TempDir(), ::getpid())),
        model_(small_config()),
        optimizer_(parameters_of(model_), {}),
        store_(folder_, [this](const std::string& sentence) { warnings_.push_back(sentence); }) {
    fs::remove_all(folder_);
    train_a_little();
  }
  ~CheckpointTest() override { fs::remove_all(folder_); }

  void train_a_little() {
    for (const auto& [name, tensor] : optimizer_.parameters()) {
      tensor.mutable_grad() = torch::randn_like(tensor.detach());
    }
    optimizer_.step(0.01);
  }

  std::string save(int64_t step, int64_t keep = 5) {
    TrainerState state;
    state.step = step;
    state.tokens_seen = 10 * step;
    state.skipped_steps = 2;
    state.bad_in_a_row = 1;
    state.seconds = 1.5;
    state.threads = 3;
    state.position.epoch = 1;
    state.position.row = step;
    state.recipe_hash = "abc";
    state.data = "[1]";
    return store_.save(state, model_, optimizer_, "tokenizer bytes", keep);
  }

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_ + "/checkpoints")) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  std::string folder_;
  LanguageModel model_;
  AdamW optimizer_;
  std::vector<std::string> warnings_;
  CheckpointStore store_;
};

std::string bytes_of(const fs::path& path) { return read_file(path); }

void overwrite(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

TEST_F(CheckpointTest, EverythingComesBackBitForBit) {
  torch::manual_seed(77);
  torch::rand({3});  // a random state that is not a fresh seed's
  const std::string path = save(12);
  const at::Tensor expected_random = torch::rand({5});
  const auto expected_state = optimizer_.state();

  LanguageModel other(small_config());
  AdamW other_optimizer(parameters_of(other), {});
  const TrainerState state = verify_checkpoint(path);
  load_checkpoint(path, other, other_optimizer);
  EXPECT_EQ(state.step, 12);
  EXPECT_EQ(state.tokens_seen, 120);
  EXPECT_EQ(state.skipped_steps, 2);
  EXPECT_EQ(state.bad_in_a_row, 1);
  EXPECT_EQ(state.seconds, 1.5);
  EXPECT_EQ(state.threads, 3);
  EXPECT_EQ(state.position.epoch, 1);
  EXPECT_EQ(state.position.row, 12);
  EXPECT_EQ(state.recipe_hash, "abc");
  EXPECT_EQ(state.data, "[1]");
  const auto actual_state = other_optimizer.state();
  for (size_t i = 0; i < expected_state.size(); ++i) {
    EXPECT_TRUE(at::equal(actual_state[i].second, expected_state[i].second))
        << expected_state[i].first;
  }
  for (const auto& item : model_->named_parameters()) {
    EXPECT_TRUE(at::equal(other->named_parameters()[item.key()], item.value())) << item.key();
  }
  EXPECT_TRUE(at::equal(torch::rand({5}), expected_random));
}

TEST_F(CheckpointTest, IsAModelFolder) {
  const std::string path = save(3);
  EXPECT_EQ(bytes_of(path + "/tokenizer.model"), "tokenizer bytes");
  EXPECT_EQ(load_pretrained(path)->config().hidden_size, 8);
  EXPECT_EQ(resolve_model_folder(path), path);
  EXPECT_EQ(resolve_model_folder(folder_), path);
  EXPECT_THROW(resolve_model_folder(testing::TempDir() + "/no_such_run"), UsageError);
  publish_model(path, folder_ + "/final");
  publish_model(path, folder_ + "/final");  // replaces
  EXPECT_EQ(bytes_of(folder_ + "/final/model.safetensors"), bytes_of(path + "/model.safetensors"));
  EXPECT_FALSE(fs::exists(folder_ + "/final/optimizer.safetensors"));
}

TEST_F(CheckpointTest, PublishedModelIsApartFromTheRun) {
  const std::string path = save(3), model = folder_ + "/final";
  publish_model(path, model);
  EXPECT_NO_THROW(verify_model(model));
  EXPECT_NO_THROW(verify_model(path));
  for (const char* name : {"model.safetensors", "config.json", "tokenizer.model"}) {
    std::string bytes = bytes_of(model + "/" + name);
    bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
    {
      std::fstream file(model + "/" + name, std::ios::in | std::ios::out | std::ios::binary);
      file << bytes;  // in place, as a careless program does
    }
    EXPECT_THROW(verify_model(model), DamagedCheckpoint) << name;
    EXPECT_NO_THROW(verify_checkpoint(path)) << name;
    publish_model(path, model);
  }
  overwrite(model + "/checksums.json", "{");
  EXPECT_THROW(verify_model(model), DamagedCheckpoint);
  fs::remove(model + "/checksums.json");
  EXPECT_NO_THROW(verify_model(model));  // a model from elsewhere has none
}

TEST_F(CheckpointTest, WhatIsNoDamageSetsNothingAside) {
  save(1);
  const std::string newest = save(2), record = newest + "/trainer.json";
  const std::string good = bytes_of(record);
  // Another format version, with its own checksum.
  auto changed = nlohmann::json::parse(good);
  changed.erase("crc32");
  changed["version"] = 2;
  const std::string text = changed.dump();
  changed["crc32"] = crc32_of(text.data(), text.size());
  overwrite(record, changed.dump());
  EXPECT_THROW(store_.newest_good(), Error);
  overwrite(record, good);
  // A file that cannot be opened: a link that leads to itself (ELOOP).
  const std::string weights = newest + "/model.safetensors";
  fs::rename(weights, weights + ".away");
  fs::create_symlink("model.safetensors", weights);
  EXPECT_THROW(store_.newest_good(), Error);
  fs::remove(weights);
  fs::rename(weights + ".away", weights);
  EXPECT_EQ(store_.newest_good()->state.step, 2);
  EXPECT_TRUE(warnings_.empty());
  EXPECT_EQ(names(), (std::vector<std::string>{"step-00000001", "step-00000002"}));
}

TEST_F(CheckpointTest, KeepsTheNewest) {
  for (const int64_t step : {2, 10, 9999999, 123456789}) save(step, 2);
  EXPECT_EQ(names(), (std::vector<std::string>{"step-09999999", "step-123456789"}));
  const std::vector<std::string> list = store_.list();
  ASSERT_EQ(list.size(), 2u);
  EXPECT_TRUE(list[0].ends_with("step-123456789")) << list[0];  // by number, not by name
}

TEST_F(CheckpointTest, KeepOneNeverLeavesNone) {
  save(1, 1);
  save(2, 1);
  EXPECT_EQ(names(), (std::vector<std::string>{"step-00000002"}));
  EXPECT_EQ(store_.newest_good()->state.step, 2);
}

TEST_F(CheckpointTest, FailureAtAnyStageLeavesTheOlderOne) {
  for (const std::string failing : {"model", "optimizer", "trainer", "rename"}) {
    fs::remove_all(folder_);
    store_.on_stage = nullptr;
    save(1, 1);
    store_.on_stage = [&failing](std::string_view stage) {
      if (stage == failing) throw Error("injected");
    };
    EXPECT_THROW(save(2, 1), Error) << failing;
    EXPECT_EQ(names(), (std::vector<std::string>{"step-00000001"})) << failing;
    EXPECT_EQ(store_.newest_good()->state.step, 1) << failing;
  }
}

TEST_F(CheckpointTest, FailureBetweenRenameAndPruneKeepsBoth) {
  save(1, 1);
  store_.on_stage = [](std::string_view stage) {
    if (stage == "prune") throw Error("injected");
  };
  EXPECT_THROW(save(2, 1), Error);
  EXPECT_EQ(store_.newest_good()->state.step, 2);
  EXPECT_EQ(names().size(), 2u);
}

TEST_F(CheckpointTest, ProcessKilledWhileSavingLeavesTheOlderOne) {
  for (const std::string killed_at : {"model", "optimizer", "trainer", "rename", "prune"}) {
    fs::remove_all(folder_);
    store_.on_stage = nullptr;
    save(1, 1);
    EXPECT_EXIT(
        {
          store_.on_stage = [&killed_at](std::string_view stage) {
            if (stage == killed_at) ::_exit(7);
          };
          save(2, 1);
        },
        testing::ExitedWithCode(7), "");
    store_.recover();
    EXPECT_EQ(store_.newest_good()->state.step, killed_at == "prune" ? 2 : 1) << killed_at;
    for (const std::string& name : names()) EXPECT_EQ(name.find("tmp"), std::string::npos) << name;
  }
}

TEST_F(CheckpointTest, HalfRemovedCheckpointIsNoCheckpoint) {
  save(1);
  fs::create_directories(folder_ + "/checkpoints/removing-step-00000009");
  fs::create_directories(folder_ + "/checkpoints/step-12");  // not a name that save() gives
  EXPECT_EQ(store_.newest_good()->state.step, 1);
  store_.recover();
  EXPECT_FALSE(fs::exists(folder_ + "/checkpoints/removing-step-00000009"));
}

TEST_F(CheckpointTest, AnyFlippedBitIsFound) {
  const std::string path = save(1);
  ASSERT_NO_THROW(verify_checkpoint(path));
  for (const auto& entry : fs::directory_iterator(path)) {
    const std::string good = bytes_of(entry.path());
    const size_t stride = std::max<size_t>(1, good.size() / 40);
    for (size_t at = 0; at < good.size(); at += stride) {
      // White space between JSON tokens means nothing.
      if (entry.path().filename() == "trainer.json" && std::isspace(good[at])) continue;
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ 4);
      overwrite(entry.path(), bad);
      EXPECT_THROW(verify_checkpoint(path), Error) << entry.path() << " byte " << at;
    }
    overwrite(entry.path(), good);
  }
  EXPECT_NO_THROW(verify_checkpoint(path));
}

TEST_F(CheckpointTest, TruncatedEmptyAndMissingFilesAreFound) {
  const std::string path = save(1);
  for (const char* name : {"config.json", "model.safetensors", "optimizer.safetensors",
                           "tokenizer.model", "trainer.json"}) {
    const fs::path file = fs::path(path) / name;
    const std::string good = bytes_of(file);
    for (const size_t size : {size_t{0}, good.size() / 2, good.size() - 2}) {
      overwrite(file, good.substr(0, size));
      EXPECT_THROW(verify_checkpoint(path), Error) << name << " cut to " << size;
    }
    fs::remove(file);
    try {
      verify_checkpoint(path);
      ADD_FAILURE() << name << " missing, but accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(file.string()), std::string::npos) << error.what();
    }
    overwrite(file, good);
  }
}

TEST_F(CheckpointTest, DamagedNewestFallsBackWithAWarning) {
  const std::string old = save(1), middle = save(2), newest = save(3);
  overwrite(middle + "/config.json", "{}");
  overwrite(newest + "/model.safetensors", "");
  EXPECT_EQ(store_.newest_good()->folder, old);
  ASSERT_EQ(warnings_.size(), 2u);
  EXPECT_EQ(warnings_[0].find(newest + "/model.safetensors: damaged"), 0u) << warnings_[0];
  EXPECT_EQ(warnings_[1].find(middle + "/config.json: damaged"), 0u) << warnings_[1];
  EXPECT_TRUE(fs::exists(newest + ".corrupt/config.json"));  // nothing is thrown away
  EXPECT_EQ(store_.list(), (std::vector<std::string>{old}));
  save(3);  // the name is free again
  EXPECT_EQ(store_.newest_good()->state.step, 3);
}

TEST_F(CheckpointTest, AllDamagedIsAnErrorAndTouchesNothing) {
  const std::string path = save(1);
  overwrite(path + "/trainer.json", "not json");
  EXPECT_THROW(store_.newest_good(), Error);
  EXPECT_TRUE(fs::exists(path));
}

TEST_F(CheckpointTest, NoCheckpointsIsNoError) { EXPECT_FALSE(store_.newest_good().has_value()); }

}  // namespace
}  // namespace efla
