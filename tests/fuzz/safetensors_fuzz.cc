// libFuzzer target: any bytes as a safetensors file.
#include "tests/fuzz/readers.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  efla::fuzz::read_safetensors({data, size});
  return 0;
}
