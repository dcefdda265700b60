// What stands in a block's mixer place: anything that mixes tokens along the sequence. A further
// family is one more subclass in a file of its own and one more line in make_mixer().
#pragma once

#include <torch/torch.h>

#include <memory>
#include <optional>

#include "efla/nn/cache.h"
#include "efla/nn/config.h"

namespace efla {

class Mixer : public torch::nn::Module {
 public:
  /// x [B, T, hidden] -> [B, T, hidden]. cu_seqlens [N + 1] packs N documents into a batch of one;
  /// nothing crosses their borders; rows past its last entry give zeros or anything finite. With a
  /// cache the B (or N) sequences continue from it (undefined tensors: from nothing) and it is
  /// advanced; T may be any number, 0 too, and documents of a packed call may be empty. Padded rows
  /// never arrive here: the model packs their valid tokens first.
  virtual at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& cu_seqlens,
                             Cache::Layer* cache) = 0;

  /// Draws the initial weights from the global generator of torch.
  virtual void initialize(double range) = 0;
};

/// The mixer of layer `layer` (config.mixer_kind). `options`: dtype and device of the parameters.
std::shared_ptr<Mixer> make_mixer(const ModelConfig& config, int64_t layer,
                                  const at::TensorOptions& options);

}  // namespace efla
