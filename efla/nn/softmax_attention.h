// Causal softmax attention over tensors that hold [B, heads, T, head size], and rotary positions.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace efla {

/// Cosines and sines of the rotation angles position * theta^(-2i / D), i < D / 2; float32 (float64
/// for `type` float64). positions [T] or [B, T], integers; the tables are [T, D / 2] or
/// [B, 1, T, D / 2], on the positions' device.
struct RotaryTable {
  RotaryTable(const at::Tensor& positions, int64_t head_size, double theta, at::ScalarType type);
  at::Tensor cos, sin;
};

/// Rotates the pairs (x[i], x[i + D / 2]) of x [B, heads, T, D] by the table's angles.
at::Tensor rotate(const at::Tensor& x, const RotaryTable& table);

/// softmax(q k^T / sqrt(D)) v where the queries are the last tokens of the keys: query i sees the
/// keys up to its own, Tk - Tq + i. q [B, H, Tq, D], k and v [B, Hkv, Tk, D], H a multiple of Hkv
/// (query head h reads key head h / (H / Hkv)), Tk >= Tq. `window`: a query sees itself and the
/// window - 1 keys before it; 0: all. starts[b]: keys of row b before it are padding, which must be
/// finite; empty: none. Never holds more than a block of the mask.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            int64_t window = 0, const std::vector<int64_t>& starts = {});

}  // namespace efla
