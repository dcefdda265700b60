// Joins the parts of split sequences: S_p+1 = M_p S_p + N_p, part after part, and for the backward
// dS_p = M_p^T dS_p+1 + N'_p from the last part to the first. Nothing is dropped: the exact flow
// without a gate forgets nothing that a later part could do without. Both operands are sums of two
// bfloat16 (transition.cuh) and three of the four products are made, with an error of about 1e-5.
#pragma once

#include "efla/kernels/cuda/sm90/state_rows.cuh"
#include "efla/kernels/cuda/sm90/transition.cuh"

namespace efla::cuda::sm90 {

template <int kK>
struct JoinShared {
  alignas(1024) Transition<kK> transitions[2];  // of a step and the next
  Barrier full[2];
};

// d += S^T M^T of a warpgroup's 64 columns of V, or in reverse S^T M, with S^T packed.
template <int kK, bool kReverse>
__device__ __forceinline__ void multiply_transition(float (&d)[kK / 2],
                                                    const uint32_t (&state)[kK / 16][4],
                                                    const unsigned char* m) {
  const uint64_t b = kReverse ? describe_rows(m) : describe_columns(m, kK * 128);
#pragma unroll
  for (int i = 0; i < kK / 16; ++i) {
    if constexpr (kReverse) {
      product<__nv_bfloat16>(d, state[i], b + i / 4 * (kK * 128 / 16) + i % 4 * 2, true);
    } else {
      product_columns<__nv_bfloat16>(d, state[i], b + 128 * i, true);
    }
  }
}

// grid (sequences * HV, kK / 64), a warpgroup each, for K and V padded to kK. Writes what each
// part's walk starts from to `states`: the state before the part, or (kReverse) dS behind it. What
// leaves the sequence at the other end comes from the walk of its last (first) part, but from here
// for empty sequences, which have no part.
template <int kK, bool kReverse>
__global__ void __launch_bounds__(kWarpgroup) join_kernel(const ScanArgs args, float* states) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& s = *reinterpret_cast<JoinShared<kK>*>(shared_bytes);
  if (threadIdx.x == 0) {
    s.full[0].init(1), s.full[1].init(1);
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_stream();
  const ChunkArgs& a = args.common;
  const int64_t sequence = blockIdx.x / a.value_heads;
  const int hv = static_cast<int>(blockIdx.x % a.value_heads), column = blockIdx.y * 64;
  int64_t first, tokens = a.tokens;
  if (a.cu_seqlens) {
    first = sequence + a.cu_seqlens[sequence] / args.part_tokens;
    tokens = a.cu_seqlens[sequence + 1] - a.cu_seqlens[sequence];
  } else {
    first = sequence * ((a.tokens + args.part_tokens - 1) / args.part_tokens);
  }
  const int parts =
      agreed(static_cast<int>((max(tokens, int64_t{0}) + args.part_tokens - 1) / args.part_tokens));
  const auto place = [&](int step) {
    return ((first + (kReverse ? parts - 1 - step : step)) * a.value_heads + hv) * kK * kK;
  };
  // Starts copying the transition of a step; the first has none, its walk began with what enters,
  // nor has the last.
  const auto fetch = [&](int step) {
    if (step + 1 >= parts || !elect_one(threadIdx.x)) return;
    Barrier& full = s.full[step % 2];
    full.arrive_expecting(sizeof(Transition<kK>));
    load_bytes(&s.transitions[step % 2], args.transitions + place(step), sizeof(Transition<kK>),
               full);
  };
  const auto read_results = [&](float(&x)[kK / 2], int step) {
    load_part<kK>(x, args.part_results + place(step), column);
  };
  const auto write_state = [&](float(&x)[kK / 2], int step) {
    store_part<kK>(x, states + place(step), column);
  };
  const float* entering = kReverse ? a.grad_final_state : a.initial_state;
  float* leaving = kReverse ? a.grad_initial_state : a.final_state;
  const int64_t whole = (sequence * a.value_heads + hv) * a.key_dim * a.value_dim;

  fetch(1), fetch(2);
  float x[kK / 2] = {}, next[kK / 2];
  if (entering) load_state<kK>(x, entering + whole, a.key_dim, a.value_dim, column);
  if (parts == 0) {
    if (leaving) store_state<kK>(x, leaving + whole, a.key_dim, a.value_dim, column);
    return;
  }
  write_state(x, 0);
  if (parts == 1) return;
  read_results(x, 0);
  if (parts > 2) read_results(next, 1);
  // From the state before part `step`, to where its N is. What else there is to do, while the
  // products run.
  const auto pass = [&](float(&from)[kK / 2], float(&to)[kK / 2], int step) {
    uint32_t head[kK / 16][4], tail[kK / 16][4];
#pragma unroll
    for (int i = 0; i < kK / 16; ++i) split_step(head[i], tail[i], &from[8 * i]);
    s.full[step % 2].wait((step - 1) / 2 % 2);
    const Transition<kK>& m = s.transitions[step % 2];
    pin(to);
    fence_products();
    multiply_transition<kK, kReverse>(to, tail, m.head[0]);
    multiply_transition<kK, kReverse>(to, head, m.tail[0]);
    multiply_transition<kK, kReverse>(to, head, m.head[0]);
    commit_products();
    write_state(from, step);
    read_results(from, min(step + 1, parts - 2));  // of the last part nobody asks
    wait_products<0>();
    pin(to);
    __syncthreads();  // all have read the transition
    fetch(step + 2);
  };
#pragma unroll 1
  for (int step = 1;; step += 2) {
    if (step + 1 >= parts) return write_state(x, step);
    pass(x, next, step);
    if (step + 2 >= parts) return write_state(next, step + 1);
    pass(next, x, step + 1);
  }
}

}  // namespace efla::cuda::sm90
