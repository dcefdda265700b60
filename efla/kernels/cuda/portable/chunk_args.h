// From the interface's problem to the arguments of the chunk kernels.
#pragma once

#include "efla/kernels/cuda/portable/chunk_common.cuh"

namespace efla::cuda {

/// Fills in what the problem says; outputs and workspaces are the caller's.
inline void set_problem(ChunkArgs& a, const Problem& p) {
  const Shape& s = p.shape;
  a.q = p.q, a.k = p.k, a.v = p.v, a.beta = p.beta, a.log_decay = p.log_decay;
  a.initial_state = static_cast<const float*>(p.initial_state);
  a.cu_seqlens = p.cu_seqlens;
  a.longest_first = p.cu_seqlens ? p.longest_first : nullptr;
  a.sequences = s.sequences;
  a.tokens = s.tokens;
  a.heads = static_cast<int>(s.heads);
  a.value_heads = static_cast<int>(s.value_heads);
  a.key_dim = static_cast<int>(s.key_dim);
  a.value_dim = static_cast<int>(s.value_dim);
  a.scale = static_cast<float>(p.scale);
  a.rule = p.rule;
  a.qk_l2norm = p.qk_l2norm;
}

}  // namespace efla::cuda
