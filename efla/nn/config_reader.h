// Reading a config's JSON object key by key with one clear sentence for every misfit.
#pragma once

#include <fmt/format.h>

#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace efla {

/// Reads fields into variables that hold their defaults; throws UsageError "WHERE: KEY must be
/// EXPECTED, not FOUND". A key that is absent leaves its variable alone.
class FieldReader {
 public:
  /// Both arguments must outlive the reader.
  FieldReader(const nlohmann::json& object, const std::string& where);

  void read(const char* key, bool& out);
  void read(const char* key, int64_t& out);
  void read(const char* key, std::optional<int64_t>& out);
  void read(const char* key, double& out);
  void read(const char* key, std::string& out);
  void read(const char* key, std::vector<int64_t>& out);
  /// [low, high]; a number may also be {"__float__": "Infinity"}, as transformers writes it.
  void read_range(const char* key, double& low, double& high);
  /// One of `choices`, by the name that to_string gives it.
  template <typename Enum>
  void read(const char* key, Enum& out, std::initializer_list<Enum> choices) {
    const nlohmann::json* value = find(key);
    if (!value) return;
    std::string names;
    for (const Enum choice : choices) {
      if (value->is_string() && value->get_ref<const std::string&>() == to_string(choice)) {
        out = choice;
        return;
      }
      names += (names.empty() ? "" : ", ") + to_string(choice);
    }
    fail(key, "one of " + names, *value);
  }
  /// A feature that has no counterpart here: only the values that leave it off are accepted.
  void only(const char* key, std::initializer_list<nlohmann::json> accepted, const char* reason);
  /// A key whose value has no effect; listed by unused() if it is there with another value than
  /// `usual`.
  void without_effect(const char* key, const nlohmann::json& usual = nullptr);

  bool has(const char* key) const { return object_.contains(key); }
  bool is_null(const char* key) const;
  /// The value of a key that takes an object; marked as read. nullptr when absent or null.
  const nlohmann::json* object(const char* key);

  /// The keys that were neither read nor are book-keeping. Each must be obsolete or switched off;
  /// any other may change the mathematics and throws.
  std::vector<std::string> unused() const;

  [[noreturn]] void fail(const char* key, const std::string& expected,
                         const nlohmann::json& found) const;

 private:
  const nlohmann::json* find(const char* key);
  int64_t integer(const char* key, const nlohmann::json& value) const;

  const nlohmann::json& object_;
  const std::string& where_;
  std::set<std::string> known_;
  std::vector<std::string> ineffective_;
};

/// null for an absent value.
nlohmann::json optional_json(const std::optional<int64_t>& value);
/// A number; infinity as {"__float__": "Infinity"}.
nlohmann::json number_json(double value);

}  // namespace efla
