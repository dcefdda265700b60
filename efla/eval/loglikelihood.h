// Log-likelihoods of continuations after contexts, many at once.
//
// The continuations of a question share its context. A model with a recurrent state reads the
// context once and goes on from a copy of the state for each of them; what all requests of a group
// have in common is read once, wherever they part.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "efla/nn/language_model.h"

namespace efla {

/// The tokens of `continuation` are predicted, each from everything before it.
struct LikelihoodRequest {
  std::vector<int32_t> context;       // one token or more
  std::vector<int32_t> continuation;  // one token or more
};
using RequestGroup = std::vector<LikelihoodRequest>;

struct Likelihood {
  double log = 0;      // sum of the tokens' log-probabilities, natural logarithm
  bool greedy = true;  // every token is the likeliest one
};
using GroupLikelihoods = std::vector<Likelihood>;  // one for each request, in order

struct LikelihoodProgress {
  int64_t tokens_done = 0, tokens = 0;  // read by the model, and to be read in all
  int64_t groups_done = 0;
};

struct LikelihoodOptions {
  int64_t batch_tokens = 8192;  // tokens of one forward call; changes speed and memory only
  bool share_contexts = true;   // false: every request reads its own context
  /// Called as soon as a group is done, in no particular order.
  std::function<void(size_t group, const GroupLikelihoods&)> on_group;
  std::function<void(const LikelihoodProgress&)> progress;  // after each call; may be empty
};

struct LikelihoodCost {
  int64_t tokens_read = 0;       // by the model
  int64_t tokens_requested = 0;  // what it would read if nothing were shared
};

/// The groups' likelihoods in their order. Probabilities are float32 whatever the model's dtype
/// (float64 for a float64 model). Groups of similar length are packed into one call without
/// padding, longest first. Throws Error for a token outside the vocabulary, an empty context or
/// continuation, and weights that give NaN.
std::vector<GroupLikelihoods> likelihoods(LanguageModel model,
                                          const std::vector<RequestGroup>& groups,
                                          const LikelihoodOptions& options = {},
                                          LikelihoodCost* cost = nullptr);

}  // namespace efla
