// Plain-pointer parameters of every kernel: shapes, strides, units. No torch type appears here, so
// the same structs serve the CPU kernels, the CUDA kernels and any embedder.
//
// Every pointer is in the memory of the device that runs the kernel.
//
// Strides count elements, not bytes; all offsets are 64-bit. The last dimension of every tensor is
// contiguous (stride 1), the others are free. Views are null-able where a comment says so.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "efla/flow/step_rule.h"

namespace efla {

/// Largest head dimensions (K and V) and the most tokens of one step: what the kernels have room
/// for. Callers check them.
inline constexpr int64_t kMaxHeadDim = 512;
inline constexpr int64_t kMaxStepTokens = 8;

/// Storage type of q, k, v, o and their gradients. Arithmetic is float for kFloat32, kBFloat16 and
/// kFloat16, double for kFloat64; states and scalars are stored in the arithmetic type, where
/// StepParams does not say otherwise.
enum class DType : int { kFloat32 = 0, kFloat64, kBFloat16, kFloat16 };

/// A tensor [B, T, H, D] with D contiguous; for scalars per token and head D is absent.
/// Element (b, t, h, d) is at data[b * batch + t * token + h * head + d].
struct View {
  const void* data = nullptr;
  int64_t batch = 0;  // stride of B, elements
  int64_t token = 0;  // stride of T, elements
  int64_t head = 0;   // stride of H, elements
};

/// The same for a tensor that the kernel writes.
struct MutableView {
  void* data = nullptr;
  int64_t batch = 0;
  int64_t token = 0;
  int64_t head = 0;
};

/// Sizes that forward and backward share.
struct Shape {
  int64_t batch = 0;        // B; 1 when packed
  int64_t tokens = 0;       // T
  int64_t heads = 0;        // H, heads of q and k
  int64_t value_heads = 0;  // HV, a multiple of H; value head i reads key head i / (HV / H)
  int64_t key_dim = 0;      // K <= kMaxHeadDim
  int64_t value_dim = 0;    // V <= kMaxHeadDim
  int64_t sequences = 0;    // N: B when dense, the number of packed sequences otherwise
};

/// What defines the operator apart from its tensors.
struct Problem {
  Shape shape;
  DType dtype = DType::kFloat32;
  Rule rule = Rule::kExact;
  double scale = 1.0;      // multiplies q
  bool qk_l2norm = false;  // q, k <- x * rsqrt(sum x^2 + 1e-6) before use

  View q, k;       // [B, T, H, K], storage type
  View v;          // [B, T, HV, V], storage type
  View beta;       // [B, T, HV], arithmetic type
  View log_decay;  // [B, T, HV], arithmetic type; null: no decay

  const void* initial_state = nullptr;  // [N, HV, K, V] contiguous, arithmetic type; null: zero. On
                                        // a GPU states and their gradients start on 16 bytes

  // Packed sequences: offsets [N + 1] into T, non-decreasing, first >= 0, last <= T.
  // Null: dense, sequence b is row b. Rows of T outside [offsets[0], offsets[N]) give o = 0.
  const int64_t* cu_seqlens = nullptr;
  // [N]: the sequences' numbers in the order in which a GPU is to begin with them, the longest
  // first; it changes no result. Null: as they lie. (CPU kernels look at lengths themselves.)
  const int64_t* longest_first = nullptr;
};

/// Runs body(i) for every i in [0, count), possibly in parallel; returns when all are done.
/// The kernels own no threads: whoever calls them says how to run. `threads` bounds the
/// parallelism and is all that a kernel may base its split of the work on.
struct Executor {
  int threads = 1;
  std::function<void(int64_t count, const std::function<void(int64_t)>& body)> parallel_for =
      [](int64_t count, const std::function<void(int64_t)>& body) {
        for (int64_t i = 0; i < count; ++i) body(i);
      };
};

/// Forward of the whole sequence (efla.chunk and efla.recurrent).
struct ForwardParams {
  Problem problem;
  MutableView o;                // [B, T, HV, V], storage type; every row is written
  void* final_state = nullptr;  // [N, HV, K, V] contiguous, arithmetic type; null: not wanted

  // States kept for backward, arithmetic type, [checkpoint_rows(shape), HV, K, V] contiguous: the
  // state before every kCheckpointTokens-th token of each sequence. Null in inference. (On a GPU
  // something else: chunk_checkpoint_bytes() of cuda/delta_rule.h.)
  void* checkpoints = nullptr;
};

/// Backward. Gradient views may be null where not wanted; every row of the others is written.
struct BackwardParams {
  Problem problem;
  View grad_o;                             // [B, T, HV, V], storage type
  const void* grad_final_state = nullptr;  // [N, HV, K, V] contiguous, arithmetic type; or null
  const void* checkpoints = nullptr;       // what forward kept
  MutableView grad_q, grad_k;              // [B, T, H, K], storage type
  MutableView grad_v;                      // [B, T, HV, V], storage type
  MutableView grad_beta, grad_log_decay;   // [B, T, HV], arithmetic type
  void* grad_initial_state = nullptr;      // [N, HV, K, V] contiguous, arithmetic type
};

/// One or a few tokens per sequence against a pool of states, in place (efla.step_).
struct StepParams {
  // problem.shape: batch = sequences = number of rows, tokens = T <= kMaxStepTokens; initial_state
  // and cu_seqlens are unused.
  Problem problem;
  MutableView o;                           // [B, T, HV, V], storage type
  void* state = nullptr;                   // pool [P, HV, K, V] contiguous, updated in place
  int64_t pool_size = 0;                   // P
  const int64_t* state_indices = nullptr;  // [B]; -1: padding row (o = 0). Null: row b

  // How the pool is stored; none: in the arithmetic type. With float arithmetic also kBFloat16, on
  // a GPU kFloat16 too: float between the tokens of a call, rounded to nearest once.
  std::optional<DType> state_dtype;
};

/// Tokens between two saved states.
inline constexpr int64_t kCheckpointTokens = 512;

/// Rows of the checkpoint tensor: an upper bound that needs no look at cu_seqlens.
/// Dense: B * ceil(T / 512). Packed: ceil(T / 512) + N; sequence n starts at row
/// n + cu_seqlens[n] / 512, which never overlaps its neighbour.
inline int64_t checkpoint_rows(const Shape& s, bool packed) {
  const int64_t per = (s.tokens + kCheckpointTokens - 1) / kCheckpointTokens;
  return packed ? per + s.sequences : s.batch * per;
}

}  // namespace efla
