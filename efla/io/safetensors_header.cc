#include "efla/io/safetensors_header.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "efla/io/error.h"

namespace efla {
namespace {

constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr size_t kMaxDimensions = 64;  // of a tensor of torch

// Receives the header's JSON event by event, so that duplicate keys are seen and nothing but what
// the format allows is ever stored:
//   { "__metadata__": {string: string}, NAME: {"dtype": string, "shape": [int], "data_offsets":
//   [int, int]}, ... }
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(SafetensorsHeader& header, uint64_t data_begin, uint64_t data_size)
      : header_(header), data_begin_(data_begin), data_size_(data_size) {}

  std::string problem;

  bool null() override { return fail("holds a null"); }
  bool boolean(bool) override { return fail("holds a boolean"); }
  bool number_float(number_float_t, const string_t&) override {
    return fail("holds a number that is not a whole one");
  }
  bool binary(binary_t&) override { return fail("holds binary data"); }
  bool number_integer(number_integer_t) override { return fail("holds a negative number"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (state_ != State::kShape && state_ != State::kOffsets)
      return fail("holds a number out of place");
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return fail("holds a number above 2^63");
    }
    auto& list = state_ == State::kShape ? shape_ : offsets_;
    if (list->size() == kMaxDimensions) {
      return tensor_fail("has a list of more than " + std::to_string(kMaxDimensions) + " numbers");
    }
    list->push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(string_t& value) override {
    if (state_ == State::kMetadata) {
      header_.metadata[key_] = std::move(value);
      return true;
    }
    if (state_ != State::kTensor || key_ != "dtype") return fail("holds a string out of place");
    dtype_ = std::move(value);
    return true;
  }

  bool start_object(size_t) override {
    switch (state_) {
      case State::kStart:
        state_ = State::kTop;
        return true;
      case State::kTop:
        state_ = name_ == "__metadata__" ? State::kMetadata : State::kTensor;
        dtype_.reset();
        shape_.reset();
        offsets_.reset();
        return true;
      default:
        return fail("nests objects too deeply");
    }
  }

  bool key(string_t& value) override {
    if (state_ == State::kTop) {
      if (value == "__metadata__" ? seen_metadata_ : header_.tensors.count(value) != 0) {
        return fail("names \"" + value + "\" twice");
      }
      if (value == "__metadata__") seen_metadata_ = true;
      name_ = std::move(value);
      return true;
    }
    if (state_ == State::kMetadata) {
      if (header_.metadata.count(value) != 0) return fail("names metadata \"" + value + "\" twice");
    } else if (value != "dtype" && value != "shape" && value != "data_offsets") {
      return tensor_fail("has an unknown field \"" + value + "\"");
    } else if (value == "dtype"   ? dtype_.has_value()
               : value == "shape" ? shape_.has_value()
                                  : offsets_.has_value()) {
      return tensor_fail("has the field \"" + value + "\" twice");
    }
    key_ = std::move(value);
    return true;
  }

  bool end_object() override {
    if (state_ == State::kTensor && !finish_tensor()) return false;
    state_ = state_ == State::kTop ? State::kEnd : State::kTop;
    return true;
  }

  bool start_array(size_t) override {
    if (state_ != State::kTensor || (key_ != "shape" && key_ != "data_offsets")) {
      return fail("holds a list out of place");
    }
    state_ = key_ == "shape" ? State::kShape : State::kOffsets;
    (state_ == State::kShape ? shape_ : offsets_).emplace();
    return true;
  }

  bool end_array() override {
    state_ = State::kTensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    return fail("is not valid JSON at byte " + std::to_string(position + 8));
  }

 private:
  enum class State { kStart, kTop, kMetadata, kTensor, kShape, kOffsets, kEnd };

  bool fail(const std::string& reason) {
    if (problem.empty()) problem = "its header " + reason;
    return false;
  }
  bool tensor_fail(const std::string& reason) {
    if (problem.empty()) problem = "tensor \"" + name_ + "\" " + reason;
    return false;
  }

  bool finish_tensor() {
    if (!dtype_ || !shape_ || !offsets_) return tensor_fail("lacks dtype, shape or data_offsets");
    const size_t width = safetensors_dtype_size(*dtype_);
    if (width == 0) return tensor_fail("has dtype " + *dtype_ + ", which is not supported");
    if (offsets_->size() != 2) return tensor_fail("needs two data_offsets");
    const auto begin = static_cast<uint64_t>((*offsets_)[0]);
    const auto end = static_cast<uint64_t>((*offsets_)[1]);
    if (begin > end || end > data_size_) {
      return tensor_fail("lies outside the file (data_offsets " + std::to_string(begin) + " to " +
                         std::to_string(end) + ", the file has " + std::to_string(data_size_) +
                         " bytes of data)");
    }
    // A size of 0 must not hide an overflow among the others: strides are products too.
    uint64_t bytes = width;
    bool empty = false;
    for (const int64_t size : *shape_) {
      empty = empty || size == 0;
      if (size > 0 && (__builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes) ||
                       bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))) {
        return tensor_fail("has a shape whose size overflows");
      }
    }
    if (empty) bytes = 0;
    if (bytes != end - begin) {
      return tensor_fail("has " + std::to_string(end - begin) +
                         " bytes of data but its shape and " + *dtype_ + " need " +
                         std::to_string(bytes));
    }
    header_.tensors[name_] = {*dtype_, *shape_, data_begin_ + begin, data_begin_ + end};
    return true;
  }

  SafetensorsHeader& header_;
  uint64_t data_begin_, data_size_;
  State state_ = State::kStart;
  bool seen_metadata_ = false;
  std::string name_, key_;
  std::optional<std::string> dtype_;
  std::optional<std::vector<int64_t>> shape_, offsets_;
};

// The tensors must tile the data: no overlap, no hole, nothing left over.
std::string find_overlap_or_hole(const SafetensorsHeader& header, size_t data_begin,
                                 size_t file_size) {
  std::vector<std::pair<const SafetensorsEntry*, const std::string*>> order;
  order.reserve(header.tensors.size());
  for (const auto& [name, entry] : header.tensors) order.emplace_back(&entry, &name);
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first->begin, a.first->end) < std::pair(b.first->begin, b.first->end);
  });
  size_t expected = data_begin;
  for (const auto& [entry, name] : order) {
    if (entry->begin < expected) return "tensor \"" + *name + "\" overlaps another one";
    if (entry->begin > expected) {
      return "there is a hole of " + std::to_string(entry->begin - expected) +
             " bytes before tensor \"" + *name + "\"";
    }
    expected = entry->end;
  }
  if (expected != file_size) {
    return std::to_string(file_size - expected) + " bytes at its end belong to no tensor";
  }
  return "";
}

}  // namespace

size_t safetensors_dtype_size(const std::string& dtype) {
  if (dtype == "F64" || dtype == "I64") return 8;
  if (dtype == "F32" || dtype == "I32") return 4;
  if (dtype == "F16" || dtype == "BF16" || dtype == "I16") return 2;
  if (dtype == "I8" || dtype == "U8" || dtype == "BOOL") return 1;
  return 0;
}

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> file,
                                           const std::string& origin) {
  const auto refuse = [&](const std::string& reason) {
    throw Error(origin + " is not a valid safetensors file: " + reason +
                "; it may be damaged or cut short, fetch or save it again");
  };
  if (file.size() < 8) refuse("it has only " + std::to_string(file.size()) + " bytes");
  uint64_t length = 0;
  for (size_t i = 8; i-- > 0;) length = (length << 8) | static_cast<uint64_t>(file[i]);
  if (length > kMaxHeaderBytes) refuse("its header claims " + std::to_string(length) + " bytes");
  if (length > file.size() - 8) {
    refuse("its header claims " + std::to_string(length) + " bytes but the file has " +
           std::to_string(file.size()));
  }
  const auto* text = reinterpret_cast<const char*>(file.data()) + 8;
  if (length == 0 || text[0] != '{') refuse("its header does not begin with {");
  SafetensorsHeader header;
  HeaderReader reader(header, 8 + length, file.size() - 8 - length);
  const bool complete = nlohmann::json::sax_parse(text, text + length, &reader);
  if (!complete) refuse(reader.problem);
  const std::string problem = find_overlap_or_hole(header, 8 + length, file.size());
  if (!problem.empty()) refuse(problem);
  return header;
}

}  // namespace efla
