// Writes the seed corpora: seed_corpus FOLDER makes FOLDER/safetensors and FOLDER/token_shard.
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
  efla::write_file_atomically(folder / "safetensors/valid", efla::fuzz::valid_safetensors());
  efla::write_file_atomically(folder / "token_shard/valid", efla::fuzz::valid_token_shard());
}
