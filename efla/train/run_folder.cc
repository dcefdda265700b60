#include "efla/train/run_folder.h"

#include <fmt/format.h>

#include <vector>

#include "efla/io/error.h"

namespace efla {
namespace {

namespace fs = std::filesystem;

// "train.seed (was 1, now 2), ..." for the settings that decide the losses and differ.
std::string differences(const Recipe& saved, const Recipe& wanted) {
  const auto was = saved.settings();
  const auto now = wanted.settings();
  std::vector<std::string> found;
  const auto text = [](const auto& map, const std::string& key) {
    const auto it = map.find(key);
    return it == map.end() ? std::string("not set") : it->second;
  };
  auto keys = was;
  keys.insert(now.begin(), now.end());
  for (const auto& [key, value] : keys) {
    if (may_change_on_resume(key) || text(was, key) == text(now, key)) continue;
    found.push_back(fmt::format("{} (was {}, now {})", key, text(was, key), text(now, key)));
  }
  std::string list;
  for (size_t i = 0; i < found.size() && i < 3; ++i) list += (i > 0 ? ", " : "") + found[i];
  if (found.size() > 3) list += fmt::format(" and {} more", found.size() - 3);
  return list;
}

void check_same_run(const fs::path& path, const Recipe& recipe) {
  const Recipe saved = Recipe::load((path / "recipe.toml").string());
  const std::string difference = differences(saved, recipe);
  if (difference.empty()) return;
  throw UsageError(fmt::format(
      "{}: holds a run with another {}; to go on with it use the same values, to start over give "
      "another train.out or --fresh",
      path.string(), difference));
}

}  // namespace

RunFolder::RunFolder(const Recipe& recipe) : path_(recipe.train.out) {
  if (path_exists(path_) && !is_folder(path_)) {
    throw UsageError(fmt::format("{}: train.out is a file; give a folder", path()));
  }
  resuming_ = path_exists(path_ / "recipe.toml");
  if (resuming_) {
    check_same_run(path_, recipe);
  } else if (path_exists(path_ / "checkpoints") || path_exists(metrics_path())) {
    throw UsageError(fmt::format(
        "{}: holds checkpoints or metrics but no recipe.toml; give another train.out or --fresh",
        path()));
  }
  make_folder(path_);
  lock_ = std::make_unique<FileLock>(path_ / "train.lock");
  if (!resuming_ &&
      path_exists(path_ / "recipe.toml")) {  // another process was here just before us
    check_same_run(path_, recipe);
    resuming_ = true;
  }
  write_file_atomically(path_ / "recipe.toml", recipe.to_toml());
}

std::string first_free_folder(const std::string& path) {
  std::string trimmed = path;
  while (trimmed.size() > 1 && trimmed.back() == '/') trimmed.pop_back();
  std::string candidate = trimmed;
  for (int i = 2; path_exists(candidate); ++i) candidate = fmt::format("{}-{}", trimmed, i);
  return candidate;
}

}  // namespace efla
