#include "efla/train/checkpoint.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "efla/io/atomic_file.h"
#include "efla/io/checksum.h"
#include "efla/io/error.h"
#include "efla/io/safetensors.h"
#include "efla/nn/pretrained.h"

namespace efla {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kFormatVersion = 1;
constexpr std::string_view kRandomState = "random_state";

constexpr const char* kChecksumsName = "checksums.json";

json file_record(const fs::path& path) {
  const FileChecksum sum = checksum_file(path);
  return {{"bytes", sum.bytes}, {"crc32", sum.crc32}};
}

// Throws DamagedCheckpoint unless each file of `records` is there as it was written.
void check_files(const fs::path& folder, const json& records, const std::string& advice) {
  for (const auto& [name, expected] : records.items()) {
    const fs::path path = folder / name;
    if (!path_exists(path)) {
      throw DamagedCheckpoint(fmt::format("{}: missing; {}", path.string(), advice));
    }
    const json actual = file_record(path);
    if (actual.at("bytes") != expected.at("bytes")) {
      throw DamagedCheckpoint(fmt::format("{}: damaged, it has {} bytes where {} were written; {}",
                                          path.string(), actual["bytes"].dump(),
                                          expected["bytes"].dump(), advice));
    }
    if (actual.at("crc32") != expected.at("crc32")) {
      throw DamagedCheckpoint(fmt::format("{}: damaged, its checksum is not the recorded one; {}",
                                          path.string(), advice));
    }
  }
}

json to_json(const TrainerState& state) {
  return {{"step", state.step},
          {"tokens_seen", state.tokens_seen},
          {"skipped_steps", state.skipped_steps},
          {"bad_in_a_row", state.bad_in_a_row},
          {"seconds", state.seconds},
          {"threads", state.threads},
          {"position", state.position.to_json()},
          {"recipe_hash", state.recipe_hash},
          {"data", state.data}};
}

TrainerState state_from_json(const json& value) {
  TrainerState state;
  value.at("step").get_to(state.step);
  value.at("tokens_seen").get_to(state.tokens_seen);
  value.at("skipped_steps").get_to(state.skipped_steps);
  value.at("bad_in_a_row").get_to(state.bad_in_a_row);
  value.at("seconds").get_to(state.seconds);
  value.at("threads").get_to(state.threads);
  state.position = DataPosition::from_json(value.at("position"));
  value.at("recipe_hash").get_to(state.recipe_hash);
  value.at("data").get_to(state.data);
  return state;
}

// The step in "step-00000120", or -1.
int64_t step_of(const std::string& name) {
  constexpr std::string_view kPrefix = "step-";
  if (name.size() < kPrefix.size() + 8 || name.size() > kPrefix.size() + 18 ||
      name.compare(0, kPrefix.size(), kPrefix) != 0 ||
      name.find_first_not_of("0123456789", kPrefix.size()) != std::string::npos) {
    return -1;
  }
  return std::stoll(name.substr(kPrefix.size()));
}

std::string folder_name(int64_t step) { return fmt::format("step-{:08d}", step); }

std::string advice() {
  return "restore it from a copy, or remove it to go on from the checkpoint before";
}

// Renames a damaged checkpoint, so that it counts no more; returns its new name.
std::string set_aside(const std::string& folder) {
  std::string moved = folder + ".corrupt";
  for (int i = 2; path_exists(moved); ++i) moved = fmt::format("{}.corrupt{}", folder, i);
  std::error_code error;
  fs::rename(folder, moved, error);
  if (error) {
    throw Error(fmt::format("{}: damaged, and cannot be renamed to {}: {}; move it away", folder,
                            moved, error.message()));
  }
  return moved;
}

void save_optimizer(const AdamW& optimizer, const fs::path& path) {
  NamedTensors tensors = optimizer.state();
  tensors.emplace_back(kRandomState, at::detail::getDefaultCPUGenerator().get_state());
  save_safetensors(path, tensors);
}

}  // namespace

CheckpointStore::CheckpointStore(const std::string& run_folder, Warn warn)
    : folder_(run_folder + "/checkpoints"), warn_(std::move(warn)) {}

std::string CheckpointStore::save(const TrainerState& state, const LanguageModel& model,
                                  const AdamW& optimizer, const std::string& tokenizer_model,
                                  int64_t keep) const {
  const auto stage = [this](std::string_view name) {
    if (on_stage) on_stage(name);
  };
  make_folder(folder_);
  const fs::path target = fs::path(folder_) / folder_name(state.step);
  write_folder_atomically(target, [&](const fs::path& folder) {
    stage("model");
    save_pretrained(model, folder.string());
    if (!tokenizer_model.empty()) {
      write_file_atomically(folder / "tokenizer.model", tokenizer_model);
    }
    stage("optimizer");
    save_optimizer(optimizer, folder / "optimizer.safetensors");
    stage("trainer");
    json record = {
        {"version", kFormatVersion}, {"state", to_json(state)}, {"files", json::object()}};
    for (const fs::path& path : folder_entries(folder)) {
      record["files"][path.filename().string()] = file_record(path);
    }
    const std::string text = record.dump();
    record["crc32"] = crc32_of(text.data(), text.size());
    write_file_atomically(folder / "trainer.json", record.dump(2) + "\n");
    stage("rename");
  });
  stage("prune");
  prune(keep);
  return target.string();
}

std::vector<std::string> CheckpointStore::list() const {
  std::vector<std::pair<int64_t, std::string>> found;
  if (!path_exists(folder_)) return {};
  for (const fs::path& path : folder_entries(folder_)) {
    const int64_t step = step_of(path.filename().string());
    if (step >= 0 && is_folder(path)) found.emplace_back(step, path.string());
  }
  std::sort(found.rbegin(), found.rend());
  std::vector<std::string> folders;
  folders.reserve(found.size());
  for (auto& [step, path] : found) folders.push_back(std::move(path));
  return folders;
}

std::optional<Checkpoint> CheckpointStore::newest_good() const {
  std::vector<std::pair<std::string, std::string>> damaged;  // folder, problem
  for (const std::string& folder : list()) {
    TrainerState state;
    try {
      state = verify_checkpoint(folder);
    } catch (const DamagedCheckpoint& error) {
      damaged.emplace_back(folder, error.what());
      continue;
    }
    for (const auto& [bad, problem] : damaged) {
      warn_(fmt::format("{}; kept as {}, going on from {}", problem, set_aside(bad), folder));
    }
    return Checkpoint{folder, state};
  }
  if (!damaged.empty()) {
    throw Error(
        fmt::format("{}, and no older checkpoint is whole: restore one from a copy, or start "
                    "over in a new folder with --fresh",
                    damaged.front().second));
  }
  return std::nullopt;
}

void CheckpointStore::recover() const {
  std::error_code ignored;
  if (!path_exists(folder_)) return;
  for (const fs::path& path : folder_entries(folder_)) {
    const std::string name = path.filename().string();
    if (name.rfind("removing-", 0) == 0) fs::remove_all(path, ignored);
    // Half-written and half-replaced checkpoints carry the name of their target and a suffix.
    const std::string stem = name.substr(0, name.find('.'));
    const std::string suffix = name.substr(stem.size());
    const bool begun = suffix.rfind(".tmp-", 0) == 0 || suffix.rfind(".old-", 0) == 0;
    if (begun && step_of(stem) >= 0) recover_folder(fs::path(folder_) / stem);
  }
}

void CheckpointStore::prune(int64_t keep) const {
  const std::vector<std::string> folders = list();
  for (size_t i = static_cast<size_t>(std::max<int64_t>(keep, 1)); i < folders.size(); ++i) {
    // Renamed first: a half-removed folder must not pass for a checkpoint.
    const fs::path path(folders[i]);
    const fs::path doomed = path.parent_path() / ("removing-" + path.filename().string());
    std::error_code error;
    fs::rename(path, doomed, error);
    if (!error) fs::remove_all(doomed, error);
    if (error)
      warn_(fmt::format("cannot remove the old checkpoint {}: {}", folders[i], error.message()));
  }
}

TrainerState verify_checkpoint(const std::string& folder) {
  const fs::path record_path = fs::path(folder) / "trainer.json";
  if (!path_exists(record_path)) {
    throw DamagedCheckpoint(fmt::format("{}: missing; {}", record_path.string(), advice()));
  }
  const std::string text = read_file(record_path);
  json record;
  try {
    record = json::parse(text);
    const auto recorded = record.at("crc32").get<uint32_t>();
    record.erase("crc32");
    const std::string rest = record.dump();
    if (crc32_of(rest.data(), rest.size()) != recorded) {
      throw DamagedCheckpoint(
          fmt::format("{}: the checksum does not match; {}", record_path.string(), advice()));
    }
    if (record.at("version").get<int>() != kFormatVersion) {
      throw Error(fmt::format("{}: format version {} is not {}, the one this program reads",
                              record_path.string(), record["version"].dump(), kFormatVersion));
    }
    check_files(folder, record.at("files"), advice());
    return state_from_json(record.at("state"));
  } catch (const json::exception&) {
    throw DamagedCheckpoint(fmt::format("{}: damaged, it is not the JSON that was written; {}",
                                        record_path.string(), advice()));
  }
}

void load_checkpoint(const std::string& folder, LanguageModel& model, AdamW& optimizer) {
  load_weights(model, fs::path(folder) / "model.safetensors");
  const SafetensorsFile file = SafetensorsFile::open(fs::path(folder) / "optimizer.safetensors");
  std::map<std::string, at::Tensor> tensors;
  for (const std::string& name : file.names()) tensors[name] = file.tensor(name);
  const auto random = tensors.find(std::string(kRandomState));
  if (random == tensors.end()) {
    throw Error(fmt::format("{}: lacks '{}'; {}", file.path().string(), kRandomState, advice()));
  }
  at::Generator generator = at::detail::getDefaultCPUGenerator();  // a handle on the global one
  generator.set_state(random->second.clone());
  tensors.erase(random);
  try {
    optimizer.load_state(tensors);
  } catch (const Error& error) {
    throw Error(fmt::format("{}: {}", file.path().string(), error.what()));
  }
}

void publish_model(const std::string& checkpoint, const std::string& folder) {
  write_folder_atomically(folder, [&checkpoint](const fs::path& target) {
    json records = json::object();
    for (const char* name : {"config.json", "model.safetensors", "tokenizer.model"}) {
      const fs::path source = fs::path(checkpoint) / name;
      if (!path_exists(source)) continue;
      std::error_code error;
      fs::copy_file(source, target / name, error);
      if (error) {
        throw Error(
            fmt::format("cannot copy {} into {}: {}; mend that and run again, the "
                        "checkpoint is whole",
                        source.string(), target.string(), error.message()));
      }
      records[name] = file_record(target / name);
    }
    write_file_atomically(target / kChecksumsName, records.dump(2) + "\n");
  });
}

void verify_model(const std::string& folder) {
  const fs::path path(folder);
  if (path_exists(path / "trainer.json")) {
    verify_checkpoint(folder);
    return;
  }
  const fs::path records = path / kChecksumsName;
  if (!path_exists(records)) return;
  const std::string advice = fmt::format(
      "copy it again from the run, or remove {} if it was changed on purpose", kChecksumsName);
  try {
    check_files(path, json::parse(read_file(records)), advice);
  } catch (const json::exception&) {
    throw DamagedCheckpoint(fmt::format("{}: damaged, it is not the JSON that was written; {}",
                                        records.string(), advice));
  }
}

std::string resolve_model_folder(const std::string& path) {
  if (path_exists(fs::path(path) / "config.json")) return path;
  const CheckpointStore store(path, [](const std::string&) {});
  const std::vector<std::string> folders = store.list();
  if (!folders.empty()) return folders.front();
  throw UsageError(fmt::format(
      "{}: holds neither config.json nor checkpoints; give a model folder or the folder of a run",
      path));
}

}  // namespace efla
