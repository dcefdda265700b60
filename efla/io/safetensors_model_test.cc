#include "efla/io/safetensors_model.h"

#include <torch/torch.h>

#include "efla/io/safetensors_index.h"
#include "efla/io/test_util.h"

namespace efla {
namespace {

namespace fs = std::filesystem;
using testing::error_of;
using testing::names_in;
using testing::slurp;
using testing::spit;
using testing::TempFolder;
using Tensors = std::vector<std::pair<std::string, at::Tensor>>;

constexpr const char* kIndex = "model.safetensors.index.json";

SafetensorsIndex parse(const std::string& text) {
  return parse_safetensors_index(text, "x.index.json");
}

std::string refusal(const std::string& text) {
  const std::string message = error_of([&] { parse(text); });
  EXPECT_EQ(message.find("x.index.json "), 0u) << message;
  EXPECT_LT(message.size(), 400u);
  return message;
}

TEST(SafetensorsIndex, WhatTransformersWrites) {
  const SafetensorsIndex index = parse(
      R"({"metadata":{"total_size":12,"nested":[{"weight_map":{"x":1}},[[]],null]},"weight_map":)"
      R"({"b":"model-00002-of-00002.safetensors","a":"model-00001-of-00002.safetensors"},"z":[1]})");
  EXPECT_EQ(index.weight_map.size(), 2u);
  EXPECT_EQ(index.weight_map.at("a"), "model-00001-of-00002.safetensors");
  EXPECT_EQ(index.files().size(), 2u);
  const SafetensorsIndex again = parse(safetensors_index_text(index, 12));
  EXPECT_EQ(again.weight_map, index.weight_map);
  EXPECT_EQ(safetensors_shard_name(2, 12), "model-00002-of-00012.safetensors");
}

TEST(SafetensorsIndex, RefusesNamesThatLeaveTheFolder) {
  for (const char* name : {"../one/model.safetensors", "/etc/x.safetensors", "a/b.safetensors",
                           "..", ".", "", "a\\\\b.safetensors", ".safetensors", "..safetensors",
                           "x\\u0000.safetensors", "passwd", "model.bin"}) {
    const std::string message = refusal(std::string(R"({"weight_map":{"a":")") + name + "\"}}");
    EXPECT_MENTIONS(message, "no file name of the form");
  }
}

TEST(SafetensorsIndex, RefusesWhatIsNoIndex) {
  EXPECT_MENTIONS(refusal(""), "not valid JSON");
  EXPECT_MENTIONS(refusal("{"), "not valid JSON");
  EXPECT_MENTIONS(refusal("[]"), "a list");
  EXPECT_MENTIONS(refusal("3"), "a number");
  EXPECT_MENTIONS(refusal("{}"), "no \"weight_map\"");
  EXPECT_MENTIONS(refusal(R"({"metadata":{"weight_map":{"a":"b.safetensors"}}})"),
                  "no \"weight_map\"");
  EXPECT_MENTIONS(refusal(R"({"weight_map":{}})"), "empty");
  EXPECT_MENTIONS(refusal(R"({"weight_map":[]})"), "a list");
  EXPECT_MENTIONS(refusal(R"({"weight_map":"a"})"), "must be an object");
  EXPECT_MENTIONS(refusal(R"({"weight_map":{"a":1}})"), "a number");
  EXPECT_MENTIONS(refusal(R"({"weight_map":{"a":{}}})"), "an object");
  EXPECT_MENTIONS(refusal(R"({"weight_map":{"a":"m.safetensors","a":"n.safetensors"}})"), "twice");
  EXPECT_MENTIONS(
      refusal(R"({"weight_map":{"a":"m.safetensors"},"weight_map":{"b":"m.safetensors"}})"), "two");
  EXPECT_MENTIONS(refusal(R"({"x":)" + std::string(1'000'000, '[')), "not valid JSON");
  EXPECT_MENTIONS(refusal(R"({"weight_map":{"a":")" + std::string(100'000, 'x') + "\"}}"), "...");
}

TEST(SafetensorsModel, OneFileOrFolder) {
  const TempFolder folder;
  save_safetensors(folder / "model.safetensors", {{"a", torch::ones({2})}});
  EXPECT_TRUE(SafetensorsModel::open(folder.path()).contains("a"));
  const SafetensorsModel model = SafetensorsModel::open(folder / "model.safetensors");
  EXPECT_TRUE(model.contains("a"));
  EXPECT_EQ(model.entry("a").dtype, "F32");
  EXPECT_MENTIONS(error_of([&] { model.tensor("d"); }), "no tensor \"d\"");
}

TEST(SafetensorsModel, AnIndexMustAgreeWithItsFiles) {
  const TempFolder folder;
  save_safetensors(folder / "m-1.safetensors", {{"a", torch::ones({2})}, {"b", torch::ones({1})}});
  save_safetensors(folder / "m-2.safetensors", {{"c", torch::zeros({3})}});
  const auto index = [&](const std::string& map) {
    spit(folder / kIndex, "{\"weight_map\":" + map + "}");
  };
  index(R"({"a":"m-1.safetensors","b":"m-1.safetensors","c":"m-2.safetensors"})");
  const SafetensorsModel model = SafetensorsModel::open(folder.path());
  EXPECT_EQ(model.names(), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_TRUE(at::equal(model.tensor("c"), torch::zeros({3})));
  const auto open = [&] { return error_of([&] { SafetensorsModel::open(folder.path()); }); };
  index(R"({"a":"m-1.safetensors","d":"m-2.safetensors"})");
  EXPECT_MENTIONS(open(), "lacks tensor \"d\"");
  index(R"({"a":"m-2.safetensors","b":"m-1.safetensors"})");
  EXPECT_MENTIONS(open(), "m-2.safetensors lacks tensor \"a\"");
  index(R"({"a":"m-3.safetensors"})");
  EXPECT_MENTIONS(open(), "m-3.safetensors is missing");
  index(R"({"a":"../m-1.safetensors"})");
  EXPECT_MENTIONS(open(), "no file name");
  save_safetensors(folder / "m-2.safetensors", {{"a", torch::zeros({3})}});
  index(R"({"a":"m-1.safetensors","b":"m-2.safetensors"})");
  EXPECT_MENTIONS(open(), "m-1.safetensors holds too");
  fs::remove(folder / kIndex);
  EXPECT_MENTIONS(open(), "no weights");
}

TEST(SafetensorsModel, APickleIsNeverOpened) {
  const TempFolder folder;
  spit(folder / "pytorch_model.bin", "cos\nsystem\n");
  const std::string message = error_of([&] { SafetensorsModel::open(folder.path()); });
  EXPECT_MENTIONS(message, "pickle");
  EXPECT_MENTIONS(message, "save_file({k: v.clone()");
  EXPECT_EQ(message.find('\n'), std::string::npos);
}

TEST(SafetensorsModel, ShardsComeBackAsTheyWere) {
  const TempFolder folder;
  torch::manual_seed(1);
  Tensors tensors;
  for (int i = 0; i < 7; ++i) {
    tensors.emplace_back("t" + std::to_string(i), torch::randn({10}));  // 40 bytes each
  }
  tensors.emplace_back("large", torch::randn({100}).to(at::kBFloat16));  // 200 bytes
  const auto expect_back = [&] {
    const SafetensorsModel model = SafetensorsModel::open(folder.path());
    EXPECT_EQ(model.names().size(), tensors.size());
    for (const auto& [name, tensor] : tensors) EXPECT_TRUE(at::equal(model.tensor(name), tensor));
  };
  save_safetensors_model(folder.path(), tensors, 100);
  expect_back();
  EXPECT_EQ(names_in(folder.path()),
            (std::vector<std::string>{
                "model-00001-of-00005.safetensors", "model-00002-of-00005.safetensors",
                "model-00003-of-00005.safetensors", "model-00004-of-00005.safetensors",
                "model-00005-of-00005.safetensors", kIndex}));
  EXPECT_MENTIONS(slurp(folder / kIndex), "\"total_size\": 480");

  // Fewer shards, then one file: nothing of the save before may be left to be read.
  spit(folder / "config.json", "{}");
  save_safetensors_model(folder.path(), tensors, 300);
  expect_back();
  EXPECT_EQ(names_in(folder.path()).size(), 4u);
  save_safetensors_model(folder.path(), tensors, 480);
  expect_back();
  EXPECT_EQ(names_in(folder.path()),
            (std::vector<std::string>{"config.json", "model.safetensors"}));
  save_safetensors_model(folder.path(), tensors, 1);  // every tensor alone
  expect_back();
  EXPECT_EQ(names_in(folder.path()).size(), tensors.size() + 2);
}

}  // namespace
}  // namespace efla
