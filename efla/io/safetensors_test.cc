#include "efla/io/safetensors.h"

#include <torch/torch.h>

#include "efla/io/test_util.h"

namespace efla {
namespace {

namespace fs = std::filesystem;
using testing::error_of;
using testing::slurp;
using testing::spit;
using testing::TempFolder;

std::string file_with(const std::string& header, size_t data_bytes) {
  std::string file(8, '\0');
  for (size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(header.size() >> (8 * i));
  return file + header + std::string(data_bytes, '\1');
}

SafetensorsHeader parse(const std::string& file) {
  return parse_safetensors_header(std::as_bytes(std::span(file)), "x.safetensors");
}

std::string refusal(const std::string& header, size_t data_bytes) {
  const std::string file = file_with(header, data_bytes);
  const std::string message = error_of([&] { parse(file); });
  EXPECT_EQ(message.find("x.safetensors is not a valid safetensors file: "), 0u) << message;
  return message;
}

std::vector<std::pair<std::string, at::Tensor>> samples() {
  torch::manual_seed(1);
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    tensors.emplace_back(std::string("float.") + c10::toString(dtype),
                         torch::randn({3, 5}).to(dtype));
  }
  for (const auto dtype : {at::kLong, at::kInt, at::kShort, at::kChar, at::kByte, at::kBool}) {
    tensors.emplace_back(std::string("int.") + c10::toString(dtype),
                         torch::randint(0, 2, {7}).to(dtype));
  }
  tensors.emplace_back("scalar", torch::tensor(2.5));
  tensors.emplace_back("empty", torch::zeros({0, 4}));
  tensors.emplace_back("strided", torch::arange(12).reshape({3, 4}).t());
  tensors.emplace_back("needs grad", torch::ones({2}, torch::requires_grad()));
  return tensors;
}

TEST(Safetensors, RoundTripOfEveryDtype) {
  const TempFolder folder;
  save_safetensors(folder / "m.safetensors", samples(), {{"note", "h\xC3\xA9"}});
  const SafetensorsFile file = SafetensorsFile::open(folder / "m.safetensors");
  EXPECT_EQ(file.names().size(), samples().size());
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.metadata().at("note"), "h\xC3\xA9");
  for (const auto& [name, tensor] : samples()) {
    const at::Tensor read = file.tensor(name);
    EXPECT_EQ(read.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_EQ(read.sizes(), tensor.sizes()) << name;
    EXPECT_TRUE(at::equal(read, tensor)) << name;
    EXPECT_FALSE(read.requires_grad());
  }
  EXPECT_MENTIONS(error_of([&] { file.tensor("none"); }), "no tensor \"none\"");
}

TEST(Safetensors, HeaderIsAlignedAndOrderDoesNotMatter) {
  const TempFolder folder;
  auto tensors = samples();
  save_safetensors(folder / "a", tensors);
  std::reverse(tensors.begin(), tensors.end());
  save_safetensors(folder / "b", tensors);
  EXPECT_EQ(slurp(folder / "a"), slurp(folder / "b"));
  const SafetensorsHeader header = parse(slurp(folder / "a"));
  for (const auto& [name, entry] : header.tensors) {
    EXPECT_EQ(entry.begin % safetensors_dtype_size(entry.dtype), 0u) << name;
  }
  EXPECT_EQ(static_cast<unsigned char>(slurp(folder / "a")[0]) % 8, 0);
}

TEST(Safetensors, TensorsOutliveTheFileAndNeverChangeIt) {
  const TempFolder folder;
  save_safetensors(folder / "a", {{"x", torch::ones({4})}});
  at::Tensor x = SafetensorsFile::open(folder / "a").tensor("x");
  x.mul_(7);
  EXPECT_TRUE(at::equal(x, torch::full({4}, 7.0)));
  EXPECT_TRUE(at::equal(SafetensorsFile::open(folder / "a").tensor("x"), torch::ones({4})));
  save_safetensors(folder / "a", {{"x", torch::zeros({4})}});  // replaced while mapped
  EXPECT_TRUE(at::equal(x, torch::full({4}, 7.0)));
}

TEST(Safetensors, MisalignedDataIsCopied) {
  const TempFolder folder;
  const std::string entry = R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  for (size_t spaces = 0; spaces < 8; ++spaces) {
    std::string file = file_with(entry + std::string(spaces, ' '), 0);
    const float data[2] = {1.5f, -2.0f};
    file.append(reinterpret_cast<const char*>(data), sizeof(data));
    spit(folder / "a", file);
    EXPECT_TRUE(
        at::equal(SafetensorsFile::open(folder / "a").tensor("x"), torch::tensor({1.5f, -2.0f})));
  }
}

TEST(Safetensors, AcceptsWhatTheFormatAllows) {
  EXPECT_TRUE(parse(file_with("{}", 0)).tensors.empty());
  EXPECT_EQ(parse(file_with(R"({"__metadata__":{"a":"b"}}   )", 0)).metadata.at("a"), "b");
  // Entries in any order; tensors of no bytes anywhere between.
  const auto header = parse(file_with(
      R"({"b":{"data_offsets":[4,8],"dtype":"I32","shape":[]},"z":{"dtype":"F64","shape":[0],"data_offsets":[4,4]},)"
      R"("a":{"shape":[2,2],"dtype":"U8","data_offsets":[0,4]}})",
      8));
  EXPECT_EQ(header.tensors.at("a").shape, (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(header.tensors.at("b").end - header.tensors.at("b").begin, 4u);
}

TEST(Safetensors, RefusesBadHeaders) {
  const auto one = [](const std::string& dtype, const std::string& shape,
                      const std::string& offsets) {
    return R"({"x":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" +
           offsets + "}}";
  };
  EXPECT_MENTIONS(refusal(one("F32", "[2]", "[0,4]"), 4), "need 8");
  EXPECT_MENTIONS(refusal(one("F32", "[2]", "[0,8]"), 4), "outside the file");
  EXPECT_MENTIONS(refusal(one("F32", "[1]", "[4,0]"), 4), "outside the file");
  EXPECT_MENTIONS(refusal(one("F32", "[1]", "[0,4]"), 5), "1 bytes at its end");
  EXPECT_MENTIONS(refusal(one("F32", "[1]", "[4,8]"), 8), "hole of 4 bytes");
  EXPECT_MENTIONS(refusal(one("F8", "[4]", "[0,4]"), 4), "dtype F8");
  EXPECT_MENTIONS(refusal(one("F32", "[-1]", "[0,4]"), 4), "negative");
  EXPECT_MENTIONS(refusal(one("F32", "[1.0]", "[0,4]"), 4), "not a whole one");
  EXPECT_MENTIONS(refusal(one("F32", "[4294967296,4294967296]", "[0,0]"), 0), "overflows");
  EXPECT_MENTIONS(refusal(one("F32", "[9223372036854775807,2,2]", "[0,0]"), 0), "overflows");
  EXPECT_MENTIONS(refusal(one("F32", "[0,4294967296,4294967296]", "[0,0]"), 0), "overflows");
  EXPECT_MENTIONS(refusal(one("F32", "[18446744073709551615]", "[0,4]"), 4), "above 2^63");
  EXPECT_MENTIONS(refusal(one("F32", "[1]", "[0]"), 4), "two data_offsets");
  EXPECT_MENTIONS(refusal(one("F32", "[[1]]", "[0,4]"), 4), "list out of place");
  std::string ones = "[1";
  for (int i = 0; i < 1'000'000; ++i) ones += ",1";
  EXPECT_MENTIONS(refusal(one("F32", ones + "]", "[0,4]"), 4), "more than 64 numbers");
  EXPECT_MENTIONS(refusal(one("F32", "null", "[0,4]"), 4), "null");
  EXPECT_MENTIONS(refusal(R"({"x":{"dtype":"F32","shape":[1]}})", 4), "lacks");
  EXPECT_MENTIONS(refusal(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"extra":1}})", 4),
                  "unknown field");
  EXPECT_MENTIONS(
      refusal(R"({"x":{"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}})", 4),
      "twice");
  EXPECT_MENTIONS(refusal(R"({"__metadata__":{"a":1}})", 0), "number out of place");
  EXPECT_MENTIONS(refusal(R"({"__metadata__":{"a":"1","a":"2"}})", 0), "twice");
  EXPECT_MENTIONS(refusal(R"({"__metadata__":{},"__metadata__":{}})", 0), "twice");
  EXPECT_MENTIONS(refusal(R"({"x":3})", 0), "number out of place");
  EXPECT_MENTIONS(refusal(R"({"x":{"dtype":"F32")", 0), "not valid JSON");
  EXPECT_MENTIONS(refusal("[]", 0), "does not begin with {");
  EXPECT_MENTIONS(refusal("", 0), "does not begin with {");
  EXPECT_MENTIONS(refusal("{\"\xFF\":1}", 0), "not valid JSON");
  EXPECT_MENTIONS(refusal(std::string(1'000'000, '{'), 0), "");
  const std::string x = R"({"dtype":"U8","shape":[4],"data_offsets":[0,4]})";
  EXPECT_MENTIONS(refusal("{\"x\":" + x + ",\"x\":" + x + "}", 4), "names \"x\" twice");
  EXPECT_MENTIONS(refusal("{\"x\":" + x + ",\"y\":" + x + "}", 4), "overlaps");
}

TEST(Safetensors, RefusesBadLengths) {
  EXPECT_MENTIONS(error_of([] { parse("abc"); }), "only 3 bytes");
  EXPECT_MENTIONS(error_of([] { parse(std::string(8, '\xFF')); }), "claims");
  EXPECT_MENTIONS(error_of([] { parse(std::string("\x10\0\0\0\0\0\0\0{}", 10)); }),
                  "claims 16 bytes");
  const TempFolder folder;
  save_safetensors(folder / "a", samples());
  const std::string whole = slurp(folder / "a");
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THROW(parse(whole.substr(0, size)), Error) << size;
  }
  EXPECT_MENTIONS(error_of([&] { SafetensorsFile::open(folder / "none"); }), "No such file");
}

TEST(Safetensors, WriterRefusesWhatTheFormatLacks) {
  const TempFolder folder;
  const at::Tensor x = torch::ones({1});
  EXPECT_MENTIONS(error_of([&] {
                    save_safetensors(folder / "a", {{"x", x}, {"x", x}});
                  }),
                  "appears twice");
  EXPECT_MENTIONS(error_of([&] {
                    save_safetensors(folder / "a", {{"__metadata__", x}});
                  }),
                  "reserved");
  EXPECT_MENTIONS(error_of([&] { save_safetensors(folder / "a", {{"\xFF", x}}); }), "UTF-8");
  EXPECT_MENTIONS(error_of([&] {
                    save_safetensors(folder / "a", {{"x", x.to(at::kComplexFloat)}});
                  }),
                  "dtype");
  EXPECT_TRUE(testing::names_in(folder.path()).empty());
}

}  // namespace
}  // namespace efla
