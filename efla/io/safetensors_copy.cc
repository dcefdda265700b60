// Reads a safetensors file and writes it again; safetensors_roundtrip_test.py compares both through
// the Python package.
#include <cstdio>

#include "efla/io/safetensors.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  try {
    const auto file = efla::SafetensorsFile::open(argv[1]);
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    for (const std::string& name : file.names()) tensors.emplace_back(name, file.tensor(name));
    efla::save_safetensors(argv[2], tensors, file.metadata());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
