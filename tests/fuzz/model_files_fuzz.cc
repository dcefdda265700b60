// libFuzzer target: any bytes as the JSON beside a model's weights, the index of its files and its
// config.json.
#include "tests/fuzz/readers.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  efla::fuzz::read_safetensors_index({data, size});
  efla::fuzz::read_config({data, size});
  return 0;
}
