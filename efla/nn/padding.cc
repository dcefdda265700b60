#include "efla/nn/padding.h"

#include <torch/torch.h>

namespace efla {

PaddedRows::PaddedRows(const at::Tensor& mask, at::IntArrayRef shape) {
  TORCH_CHECK(mask.dim() == 2 && mask.sizes() == shape, "attention_mask must have the shape of ",
              "input_ids, ", shape, ", got ", mask.sizes());
  TORCH_CHECK(at::isIntegralType(mask.scalar_type(), /*includeBool=*/true),
              "attention_mask must be bool or integer, got ", mask.scalar_type());
  batch = mask.size(0);
  length = mask.size(1);
  const at::Tensor valid = mask.ne(0);
  positions = valid.flatten().nonzero().squeeze(1);
  cu_seqlens = at::constant_pad_nd(valid.sum(1).cumsum(0), {1, 0});
}

at::Tensor PaddedRows::pack(const at::Tensor& padded) const {
  return padded.flatten(0, 1).index_select(0, positions).unsqueeze(0);
}

at::Tensor PaddedRows::unpack(const at::Tensor& packed) const {
  std::vector<int64_t> flat = packed.sizes().slice(1).vec();
  flat[0] = batch * length;
  return at::zeros(flat, packed.options())
      .index_copy(0, positions, packed.squeeze(0))
      .unflatten(0, {batch, length});
}

}  // namespace efla
