// Retrieval of a number from a long text, after RULER's single needle in a haystack (S-NIAH-1 and,
// with a text of one's own, S-NIAH-2): how far back can the model still read?
#pragma once

#include <cstdint>
#include <string>

#include "efla/eval/tasks.h"
#include "efla/io/tokenizer.h"

namespace efla {

struct PasskeyOptions {
  int64_t length = 1024;  // tokens of the whole prompt, as close below as sentences allow
  int64_t samples = 100;
  uint64_t seed = 1234;
  std::string haystack;       // its sentences are the noise; empty: five sentences, repeated
  std::string haystack_path;  // where it comes from, for messages
};

/// "passkey_1024".
std::string passkey_name(const PasskeyOptions& options);

/// One number of seven digits per sample stands in the noise, at depths that run evenly from the
/// beginning to the end; the right continuation and nine other numbers are the choices. Same
/// options and tokenizer, same samples on every machine. Throws UsageError when a prompt without
/// noise is longer than `length`, or the haystack too short.
EvalTask passkey_task(const PasskeyOptions& options, const Tokenizer& tokenizer);

}  // namespace efla
