// What the tests of this room share.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "efla/io/error.h"
#include "efla/io/random.h"

namespace efla::testing {

/// A fresh folder that goes away with the test.
class TempFolder {
 public:
  TempFolder() {
    std::string name = ::testing::TempDir() + "efla-io-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) ADD_FAILURE() << "mkdtemp failed for " << name;
    path_ = name;
  }
  ~TempFolder() {
    std::error_code code;
    std::filesystem::remove_all(path_, code);
  }
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

inline void spit(const std::filesystem::path& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

inline std::string slurp(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// The message of the efla::Error that `act` throws; a failure and "" when it throws none.
template <typename Act>
std::string error_of(const Act& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no error was thrown";
  return "";
}

inline bool mentions(const std::string& message, const std::string& part) {
  return message.find(part) != std::string::npos;
}
#define EXPECT_MENTIONS(message, part) \
  EXPECT_TRUE(::efla::testing::mentions(message, part)) << "message: " << (message)

/// Text of made-up words with some punctuation, digits and line breaks; the same for the same seed.
inline std::string made_up_text(size_t bytes, uint64_t seed) {
  static const char* const kSyllables[] = {"ba", "ne",  "tor", "li",  "sha", "ver", "mo", "in",
                                           "ga", "the", "ru",  "est", "pla", "co",  "an", "dy"};
  SplitMix64 random(seed);
  std::vector<std::string> words(400);
  for (std::string& word : words) {
    for (uint64_t n = 1 + random.below(4); n > 0; --n) word += kSyllables[random.below(16)];
  }
  std::string text;
  while (text.size() < bytes) {
    const uint64_t draw = random.below(20);
    // The product of two draws favours small indices, as word frequencies do.
    text += words[random.below(400) * random.below(400) / 400];
    text += draw == 0   ? ".\n"
            : draw == 1 ? ", "
            : draw == 2 ? " " + std::to_string(random.below(3000)) + " "
                        : " ";
  }
  text.resize(bytes);
  return text;
}

}  // namespace efla::testing
