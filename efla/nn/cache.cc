#include "efla/nn/cache.h"

#include <ATen/Functions.h>

namespace efla {

namespace {

at::Tensor clone_if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.clone() : tensor;
}

at::Tensor select_if_defined(const at::Tensor& tensor, const at::Tensor& rows) {
  return tensor.defined() ? tensor.index_select(0, rows) : tensor;
}

}  // namespace

Cache::Layer::Layer(const Layer& other)
    : recurrent_state(clone_if_defined(other.recurrent_state)),
      conv_q(clone_if_defined(other.conv_q)),
      conv_k(clone_if_defined(other.conv_k)),
      conv_v(clone_if_defined(other.conv_v)) {}

Cache::Layer& Cache::Layer::operator=(const Layer& other) {
  if (this != &other) *this = Layer(other);
  return *this;
}

int64_t Cache::batch_size() const {
  if (layers.empty() || !layers.front().recurrent_state.defined()) return 0;
  return layers.front().recurrent_state.size(0);
}

Cache Cache::select(const at::Tensor& rows) const {
  Cache selected;
  selected.tokens_seen = tokens_seen;
  selected.layers.reserve(layers.size());
  for (const Layer& layer : layers) {
    Layer& out = selected.layers.emplace_back();
    out.recurrent_state = select_if_defined(layer.recurrent_state, rows);
    out.conv_q = select_if_defined(layer.conv_q, rows);
    out.conv_k = select_if_defined(layer.conv_k, rows);
    out.conv_v = select_if_defined(layer.conv_v, rows);
  }
  return selected;
}

}  // namespace efla
