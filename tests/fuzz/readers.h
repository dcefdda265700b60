// What the fuzzers and the mutation test feed with bytes: the readers of files that come from
// elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace efla::fuzz {

/// Reads the bytes as a safetensors header, an index of safetensors files, a model's config.json or
/// a token shard and uses everything the reader let through; aborts when a promise of the reader
/// does not hold. An efla::Error of one short line is the expected answer to bad bytes. Returns
/// whether the bytes were accepted.
bool read_safetensors(std::span<const uint8_t> bytes);
bool read_safetensors_index(std::span<const uint8_t> bytes);
bool read_config(std::span<const uint8_t> bytes);
bool read_token_shard(std::span<const uint8_t> bytes);

/// Valid files to start from.
std::string valid_safetensors();
std::string valid_safetensors_index();
/// Configs of every family and origin.
std::vector<std::string> valid_configs();
std::string valid_token_shard();

}  // namespace efla::fuzz
