#include "efla/io/safetensors_index.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "efla/io/error.h"

namespace efla {
namespace {

constexpr size_t kMaxIndexBytes = 100'000'000;
constexpr std::string_view kSuffix = ".safetensors";

// A name from elsewhere must not lead out of the folder of the index.
bool is_plain_file_name(const std::string& name) {
  return name.size() > kSuffix.size() && name.ends_with(kSuffix) && name.front() != '.' &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
}

// Receives the index event by event: only weight_map is stored, whatever else stands at the top
// ("metadata") is passed over at any depth, and keys that come twice are seen.
class IndexReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit IndexReader(SafetensorsIndex& index) : index_(index) {}

  std::string problem;
  bool seen_map() const { return seen_map_; }

  bool null() override { return value("null"); }
  bool boolean(bool) override { return value("a boolean"); }
  bool number_integer(number_integer_t) override { return value("a number"); }
  bool number_unsigned(number_unsigned_t) override { return value("a number"); }
  bool number_float(number_float_t, const string_t&) override { return value("a number"); }
  bool binary(binary_t&) override { return value("binary data"); }

  bool string(string_t& text) override {
    if (state_ != State::kMap) return value("a string");
    if (!is_plain_file_name(text)) {
      return fail(
          fmt::format("maps \"{}\" to \"{}\", which is no file name of the form "
                      "NAME.safetensors beside the index",
                      shorten(key_), shorten(text)));
    }
    index_.weight_map.emplace(std::move(key_), std::move(text));
    return true;
  }

  bool start_object(size_t) override {
    if (state_ == State::kStart) {
      state_ = State::kTop;
    } else if (state_ == State::kTop && key_ == "weight_map") {
      if (std::exchange(seen_map_, true)) return fail("has two \"weight_map\"");
      state_ = State::kMap;
    } else if (state_ == State::kMap) {
      return value("an object");
    } else {
      skip();
    }
    return true;
  }
  bool end_object() override { return close(); }
  bool start_array(size_t) override {
    if (state_ == State::kStart || state_ == State::kMap ||
        (state_ == State::kTop && key_ == "weight_map")) {
      return value("a list");
    }
    skip();
    return true;
  }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    if (state_ == State::kSkipped) return true;
    if (state_ == State::kMap && index_.weight_map.count(name) != 0) {
      return fail(fmt::format("names the tensor \"{}\" twice", shorten(name)));
    }
    key_ = std::move(name);
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    return fail(fmt::format("is not valid JSON at byte {}", position));
  }

 private:
  enum class State { kStart, kTop, kMap, kSkipped, kEnd };

  // For a message of one line.
  static std::string shorten(const std::string& text) {
    constexpr size_t kShown = 80;
    std::string shown = text.substr(0, kShown);
    for (char& c : shown) {
      if (static_cast<unsigned char>(c) < ' ') c = '?';
    }
    return text.size() > kShown ? shown + "..." : shown;
  }
  bool fail(const std::string& reason) {
    if (problem.empty()) problem = reason;
    return false;
  }
  // A value where it may stand, or a refusal.
  bool value(const char* what) {
    if (state_ == State::kMap) {
      return fail(fmt::format("maps \"{}\" to {} instead of a file name", shorten(key_), what));
    }
    if (state_ == State::kStart) return fail(fmt::format("is {} and not an object", what));
    if (state_ == State::kTop && key_ == "weight_map") {
      return fail(fmt::format("has {} for \"weight_map\", which must be an object", what));
    }
    return true;
  }
  void skip() {
    state_ = State::kSkipped;
    ++depth_;
  }
  bool close() {
    if (state_ == State::kSkipped) {
      if (--depth_ == 0) state_ = State::kTop;
    } else {
      state_ = state_ == State::kMap ? State::kTop : State::kEnd;
    }
    return true;
  }

  SafetensorsIndex& index_;
  State state_ = State::kStart;
  bool seen_map_ = false;
  size_t depth_ = 0;  // of what is passed over
  std::string key_;
};

}  // namespace

std::set<std::string> SafetensorsIndex::files() const {
  std::set<std::string> files;
  for (const auto& [name, file] : weight_map) files.insert(file);
  return files;
}

SafetensorsIndex parse_safetensors_index(std::string_view text, const std::string& origin) {
  const auto refuse = [&](const std::string& reason) {
    throw Error(fmt::format("{} {}; fetch or save it again", origin, reason));
  };
  if (text.size() > kMaxIndexBytes) refuse(fmt::format("has {} bytes", text.size()));
  SafetensorsIndex index;
  IndexReader reader(index);
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), &reader)) refuse(reader.problem);
  if (!reader.seen_map()) refuse("has no \"weight_map\" object");
  if (index.weight_map.empty()) refuse("has an empty \"weight_map\"");
  return index;
}

std::string safetensors_index_text(const SafetensorsIndex& index, uint64_t total_bytes) {
  nlohmann::ordered_json json;
  json["metadata"] = {{"total_size", total_bytes}};
  json["weight_map"] = index.weight_map;
  return json.dump(2) + "\n";
}

std::string safetensors_shard_name(size_t shard, size_t shards) {
  return fmt::format("model-{:05}-of-{:05}.safetensors", shard, shards);
}

}  // namespace efla
