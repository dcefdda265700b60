#include "efla/eval/passkey.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "efla/eval/python_text.h"
#include "efla/io/error.h"
#include "efla/io/random.h"

namespace efla {
namespace {

constexpr int64_t kChoices = 10;

constexpr std::array<const char*, 5> kNoise = {"The grass is green.", "The sky is blue.",
                                               "The sun is yellow.", "Here we go.",
                                               "There and back again."};
constexpr std::array<const char*, 16> kKeys = {
    "amber",  "birch",  "canyon", "dune",    "ember",  "falcon", "garnet", "harbor",
    "island", "jasper", "kettle", "lantern", "meadow", "nectar", "orchid", "pebble"};

std::vector<std::string> sentences_of(std::string_view text) {
  std::vector<std::string> sentences;
  while (!text.empty()) {
    size_t end = text.find_first_of(".!?");
    if (end == std::string_view::npos) break;  // the last one does not end
    end = std::min(text.find_first_not_of(".!?\"')", end), text.size());
    const std::string_view sentence = strip(text.substr(0, end));
    if (sentence.size() > 1) sentences.push_back(replace_all(sentence, "\n", " "));
    text.remove_prefix(end);
  }
  return sentences;
}

// The noise: `count` sentences, from the haystack in its order or the five again and again.
class Noise {
 public:
  explicit Noise(const PasskeyOptions& options) : path_(options.haystack_path) {
    if (!options.haystack.empty()) own_ = sentences_of(options.haystack);
    if (!options.haystack.empty() && own_.empty()) {
      throw UsageError(path_ + " holds no sentence to hide a number among");
    }
  }
  bool enough(int64_t count) const {
    return own_.empty() || count <= static_cast<int64_t>(own_.size());
  }
  std::string sentence(int64_t i) const {
    return own_.empty() ? kNoise[static_cast<size_t>(i) % kNoise.size()]
                        : own_[static_cast<size_t>(i)];
  }

 private:
  std::vector<std::string> own_;
  std::string path_;
};

struct Needle {
  std::string key, value;
};

std::string prompt_text(const Noise& noise, int64_t count, int64_t position, const Needle& needle) {
  std::string text =
      "A special magic number is hidden within the following text. Make sure to memorize it. I "
      "will "
      "quiz you about the number afterwards.\n";
  for (int64_t i = 0; i <= count; ++i) {
    if (i == position) {
      text +=
          fmt::format("One of the special magic numbers for {} is: {}. ", needle.key, needle.value);
    }
    if (i < count) text += noise.sentence(i) + " ";
  }
  text.pop_back();
  return text + fmt::format(
                    "\nWhat is the special magic number for {} mentioned in the provided text? The "
                    "special magic number for {} mentioned in the provided text is",
                    needle.key, needle.key);
}

// The most sentences whose prompt, answer included, is no longer than asked for.
int64_t sentence_count(const PasskeyOptions& options, const Noise& noise, const Needle& needle,
                       const Tokenizer& tokenizer) {
  const auto fits = [&](int64_t count) {
    const std::string text = prompt_text(noise, count, count / 2, needle) + " " + needle.value;
    return static_cast<int64_t>(tokenizer.encode(text).size()) + 1 <= options.length;
  };
  if (!fits(0)) {
    throw UsageError(fmt::format(
        "a passkey prompt without any noise is longer than {} tokens; ask for a greater length",
        options.length));
  }
  int64_t low = 0, high = 1;
  while (noise.enough(high) && fits(high)) {
    low = high;
    high *= 2;
  }
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (noise.enough(middle) && fits(middle) ? low : high) = middle;
  }
  if (!noise.enough(low + 1)) {
    throw UsageError(fmt::format(
        "{} has only {} sentences, which is less than {} tokens; give a longer text or leave "
        "--haystack out",
        options.haystack_path, low, options.length));
  }
  return low;
}

std::string random_number(SplitMix64& random) {
  return std::to_string(1'000'000 + random.below(9'000'000));
}

}  // namespace

std::string passkey_name(const PasskeyOptions& options) {
  return fmt::format("passkey_{}", options.length);
}

EvalTask passkey_task(const PasskeyOptions& options, const Tokenizer& tokenizer) {
  const Noise noise(options);
  EvalTask task;
  task.spec.name = passkey_name(options);
  task.spec.kind = TaskKind::kRetrieval;
  task.spec.headline = "exact";
  task.path = options.haystack_path;
  SplitMix64 random(options.seed);
  const int64_t count = sentence_count(options, noise, {"lantern", "1234567"}, tokenizer);
  for (int64_t i = 0; i < options.samples; ++i) {
    Needle needle{kKeys[random.below(kKeys.size())], random_number(random)};
    EvalSample sample;
    sample.origin = fmt::format("{} sample {}", task.spec.name, i + 1);
    sample.gold = static_cast<int64_t>(random.below(kChoices));
    while (static_cast<int64_t>(sample.choices.size()) < kChoices) {
      const bool gold = static_cast<int64_t>(sample.choices.size()) == sample.gold;
      const std::string number = gold ? needle.value : random_number(random);
      if (!gold && number == needle.value) continue;
      sample.choices.push_back(number);
      sample.continuations.push_back(" " + number);
    }
    const int64_t position = options.samples > 1 ? count * i / (options.samples - 1) : count / 2;
    sample.contexts = {prompt_text(noise, count, position, needle)};
    task.samples.push_back(std::move(sample));
  }
  return task;
}

}  // namespace efla
