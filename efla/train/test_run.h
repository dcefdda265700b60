// A folder with small token shards and a recipe that trains on them, for the tests of this room.
#pragma once

#include <string>
#include <vector>

#include "efla/train/recipe.h"

namespace efla {

class TestRun {
 public:
  /// Bytes of `documents` as training shards and, when not empty, of `held_out`; `name` must be
  /// unique among the tests that run at the same time.
  TestRun(const std::string& name, const std::vector<std::string>& documents,
          const std::vector<std::string>& held_out = {});
  ~TestRun();
  TestRun(const TestRun&) = delete;
  TestRun& operator=(const TestRun&) = delete;

  /// One layer of 32 wide, 4 steps of 2 x 32 tokens, results in a subfolder `out`.
  Recipe recipe(const std::string& out, const std::vector<std::string>& overrides = {}) const;

  std::string path(const std::string& name) const { return folder_ + "/" + name; }

 private:
  std::string folder_;
};

/// Documents of 5 to 60 bytes, the same for the same seed.
std::vector<std::string> test_documents(int count, unsigned seed = 1);

/// The losses in a metrics file: "train 1" -> loss, bit for bit, in file order.
std::vector<std::pair<std::string, double>> logged_losses(const std::string& metrics_path);

}  // namespace efla
