#include "efla/io/safetensors.h"

#include <torch/torch.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "efla/io/atomic_file.h"
#include "efla/io/error.h"

namespace efla {
namespace {

namespace fs = std::filesystem;

struct DtypeName {
  at::ScalarType type;
  const char* name;
};

// The order in which the Python package lays tensors out: wide types first, so that every tensor is
// aligned.
constexpr DtypeName kDtypes[] = {{at::kDouble, "F64"}, {at::kLong, "I64"}, {at::kFloat, "F32"},
                                 {at::kInt, "I32"},    {at::kHalf, "F16"}, {at::kBFloat16, "BF16"},
                                 {at::kShort, "I16"},  {at::kChar, "I8"},  {at::kByte, "U8"},
                                 {at::kBool, "BOOL"}};

at::ScalarType dtype_of(const std::string& name) {
  for (const DtypeName& dtype : kDtypes) {
    if (name == dtype.name) return dtype.type;
  }
  TORCH_CHECK(false, "unreachable: the header was checked, dtype ", name);
}

struct OutputTensor {
  const std::string* name;
  const at::Tensor* tensor;
  size_t dtype;  // index into kDtypes
  size_t bytes;
};

std::vector<OutputTensor> lay_out(const fs::path& path,
                                  const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  std::vector<OutputTensor> order;
  std::set<std::string> names;
  for (const auto& [name, tensor] : tensors) {
    if (name == "__metadata__" || !names.insert(name).second) {
      throw Error("cannot write " + path.string() + ": the tensor name \"" + name +
                  (name == "__metadata__" ? "\" is reserved" : "\" appears twice"));
    }
    TORCH_CHECK(tensor.defined(), "save_safetensors: tensor ", name, " is undefined");
    size_t dtype = 0;
    while (dtype < std::size(kDtypes) && kDtypes[dtype].type != tensor.scalar_type()) ++dtype;
    if (dtype == std::size(kDtypes)) {
      throw Error("cannot write " + path.string() + ": tensor \"" + name + "\" has dtype " +
                  c10::toString(tensor.scalar_type()) +
                  ", which safetensors files cannot hold here");
    }
    order.push_back({&name, &tensor, dtype, tensor.nbytes()});
  }
  std::sort(order.begin(), order.end(), [](const OutputTensor& a, const OutputTensor& b) {
    const auto width = [](const OutputTensor& t) {
      return safetensors_dtype_size(kDtypes[t.dtype].name);
    };
    if (width(a) != width(b)) return width(a) > width(b);
    return std::pair(a.dtype, *a.name) < std::pair(b.dtype, *b.name);
  });
  return order;
}

std::string header_text(const fs::path& path, const std::vector<OutputTensor>& order,
                        const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header;
  header["__metadata__"] = metadata;
  size_t offset = 0;
  for (const OutputTensor& output : order) {
    header[*output.name] = {{"dtype", kDtypes[output.dtype].name},
                            {"shape", output.tensor->sizes().vec()},
                            {"data_offsets", {offset, offset + output.bytes}}};
    offset += output.bytes;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::exception&) {
    throw Error("cannot write " + path.string() + ": a tensor name or metadata is not valid UTF-8");
  }
  text.append((8 - text.size() % 8) % 8, ' ');
  return text;
}

}  // namespace

SafetensorsFile SafetensorsFile::open(const fs::path& path) {
  SafetensorsFile opened;
  opened.path_ = path;
  opened.file_ = MappedFile::open(path);
  opened.header_ = parse_safetensors_header(opened.file_->bytes(), path.string());
  return opened;
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  names.reserve(header_.tensors.size());
  for (const auto& [name, entry] : header_.tensors) names.push_back(name);
  return names;
}

const SafetensorsEntry& SafetensorsFile::entry(const std::string& name) const {
  const auto found = header_.tensors.find(name);
  if (found == header_.tensors.end())
    throw Error(path_.string() + " has no tensor \"" + name + "\"");
  return found->second;
}

at::Tensor SafetensorsFile::tensor(const std::string& name) const {
  const SafetensorsEntry& found = entry(name);
  const at::TensorOptions options = at::TensorOptions().dtype(dtype_of(found.dtype));
  if (found.begin == found.end) return at::empty(found.shape, options);
  std::byte* data = file_->bytes().data() + found.begin;
  if (reinterpret_cast<uintptr_t>(data) % safetensors_dtype_size(found.dtype) != 0) {
    at::Tensor copy = at::empty(found.shape, options);
    std::copy(data, data + (found.end - found.begin), static_cast<std::byte*>(copy.data_ptr()));
    return copy;
  }
  return at::from_blob(
      data, found.shape, [keep = file_](void*) {}, options);
}

void save_safetensors(const fs::path& path,
                      const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                      std::map<std::string, std::string> metadata) {
  metadata.emplace("format", "pt");
  const std::vector<OutputTensor> order = lay_out(path, tensors);
  const std::string header = header_text(path, order, metadata);
  AtomicFileWriter file(path);
  char length[8];
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i));
  file.write(length, sizeof(length));
  file.write(header);
  for (const OutputTensor& output : order) {
    const at::Tensor flat = output.tensor->detach().to(at::kCPU).contiguous();
    file.write(flat.data_ptr(), output.bytes);
  }
  file.commit();
}

}  // namespace efla
