// What a sequence carries from one call of the model to the next.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

namespace efla {

/// The decoding state of B sequences; constant size, whatever the length, except for softmax
/// layers. Empty until the first forward call, which fills it. Copying clones the tensors
/// (single-token steps update them in place), so a copy is an independent branch; moving is free.
struct Cache {
  struct Layer {
    at::Tensor recurrent_state;         // [B, HV, K, V] float32 (float64 for a float64 model)
    at::Tensor conv_q, conv_k, conv_v;  // [B, D, W]: the last W inputs of each convolution
    at::Tensor conv_xbc;                // [B, D, W]: of Mamba-2's one convolution over x, B and C
    // Softmax layers. The last tokens of every sequence (all of them without a window) stand at the
    // end of the slots in use; there may be more slots than that, for tokens to come.
    at::Tensor keys, values;  // [B, Hkv, slots, head], keys rotated
    at::Tensor lengths;       // [B] int64, on the CPU: tokens that each sequence has seen

    Layer() = default;
    Layer(Layer&&) = default;
    Layer& operator=(Layer&&) = default;
    Layer(const Layer& other);
    Layer& operator=(const Layer& other);

    /// Every tensor above, in a fixed order; undefined where the layer has none.
    std::array<at::Tensor*, 8> tensors();
    std::array<const at::Tensor*, 8> tensors() const;
  };

  std::vector<Layer> layers;
  int64_t tokens_seen = 0;  // per sequence; for packed calls of unequal lengths: of the longest

  bool empty() const { return layers.empty(); }
  int64_t batch_size() const;  // B; 0 when empty

  /// The cache of the given rows, in that order; a row may repeat (branching). rows [R] int64.
  Cache select(const at::Tensor& rows) const;
};

}  // namespace efla
