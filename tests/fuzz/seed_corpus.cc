// Writes the seed corpora: seed_corpus FOLDER makes one folder in FOLDER for every fuzzer.
#include <cstdio>
#include <filesystem>

#include "efla/io/atomic_file.h"
#include "tests/fuzz/readers.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
    return 2;
  }
  const std::filesystem::path folder = argv[1];
  efla::make_folder(folder / "safetensors");
  efla::make_folder(folder / "token_shard");
  efla::make_folder(folder / "model_files");
  efla::write_file_atomically(folder / "safetensors/valid", efla::fuzz::valid_safetensors());
  efla::write_file_atomically(folder / "token_shard/valid", efla::fuzz::valid_token_shard());
  efla::write_file_atomically(folder / "model_files/index", efla::fuzz::valid_safetensors_index());
  int count = 0;
  for (const std::string& config : efla::fuzz::valid_configs()) {
    efla::write_file_atomically(folder / "model_files" / ("config" + std::to_string(++count)),
                                config);
  }
}
