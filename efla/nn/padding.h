// Rows of different lengths in one batch: their valid tokens as packed documents, and back. Every
// layer handles packed documents, so none has to know about padding.
#pragma once

#include <ATen/core/Tensor.h>

namespace efla {

/// Where the valid tokens of a padded batch are.
struct PaddedRows {
  /// mask [B, T]: bool or integer, non-zero = valid; any pattern (right- or left-padded, with
  /// holes, empty rows). Throws c10::Error naming attention_mask otherwise.
  PaddedRows(const at::Tensor& mask, at::IntArrayRef shape);

  bool all_valid() const { return positions.numel() == batch * length; }
  /// [B, T, ...] -> [1, N, ...]: the N valid tokens, row after row.
  at::Tensor pack(const at::Tensor& padded) const;
  /// [1, N, ...] -> [B, T, ...] with zeros at the padding.
  at::Tensor unpack(const at::Tensor& packed) const;

  int64_t batch, length;  // B, T
  at::Tensor positions;   // [N] int64: of the valid tokens in the flattened batch
  at::Tensor cu_seqlens;  // [B + 1] int64: one document a row
};

}  // namespace efla
