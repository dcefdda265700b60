#include "efla/nn/cache.h"

#include <ATen/Functions.h>

#include <algorithm>

namespace efla {

namespace {

template <typename Result, typename Layer>
Result tensors_of(Layer& l) {
  return {&l.recurrent_state, &l.conv_q, &l.conv_k, &l.conv_v,
          &l.conv_xbc,        &l.keys,   &l.values, &l.lengths};
}

int64_t longest(const at::Tensor& lengths) {
  return lengths.numel() > 0 ? lengths.max().item<int64_t>() : 0;
}

// Every sequence stands at the end of the slots in use, which are as many as the longest sequence
// needs: without that one the others move up.
void drop_unneeded_slots(Cache::Layer& layer, int64_t longest_before) {
  const int64_t used = std::min(longest_before, layer.keys.size(2));  // fewer in a window
  const int64_t needed = std::min(longest(layer.lengths), used);
  layer.keys = layer.keys.narrow(2, used - needed, needed).contiguous();
  layer.values = layer.values.narrow(2, used - needed, needed).contiguous();
}

}  // namespace

std::array<at::Tensor*, 8> Cache::Layer::tensors() {
  return tensors_of<std::array<at::Tensor*, 8>>(*this);
}

std::array<const at::Tensor*, 8> Cache::Layer::tensors() const {
  return tensors_of<std::array<const at::Tensor*, 8>>(*this);
}

Cache::Layer::Layer(const Layer& other) {
  const auto from = other.tensors();
  const auto to = tensors();
  for (size_t i = 0; i < to.size(); ++i) {
    if (from[i]->defined()) *to[i] = from[i]->clone();
  }
}

Cache::Layer& Cache::Layer::operator=(const Layer& other) {
  if (this != &other) *this = Layer(other);
  return *this;
}

int64_t Cache::batch_size() const {
  if (layers.empty()) return 0;
  for (const at::Tensor* tensor : layers.front().tensors()) {
    if (tensor->defined()) return tensor->size(0);
  }
  return 0;
}

Cache Cache::select(const at::Tensor& rows) const {
  Cache selected;
  selected.tokens_seen = tokens_seen;
  selected.layers.reserve(layers.size());
  for (const Layer& layer : layers) {
    const auto from = layer.tensors();
    const auto to = selected.layers.emplace_back().tensors();
    for (size_t i = 0; i < to.size(); ++i) {
      if (from[i]->defined()) *to[i] = from[i]->index_select(0, rows.to(from[i]->device()));
    }
    if (layer.keys.defined()) drop_unneeded_slots(selected.layers.back(), longest(layer.lengths));
  }
  return selected;
}

}  // namespace efla
