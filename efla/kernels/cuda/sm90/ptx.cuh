// Hopper's own instructions under readable names: barriers in shared memory, the bulk tensor copy
// engine (TMA), warpgroup matrix products. Each wrapper is one instruction of the PTX manual.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "efla/kernels/cuda/portable/mma.cuh"

namespace efla::cuda::sm90 {

// ---- barriers -----------------------------------------------------------------------------------

// An mbarrier: a phase ends when the expected arrivals and bytes are in. Waiters give the parity of
// the phase whose end they wait for.
struct Barrier {
  uint64_t word;

  __device__ __forceinline__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&word)),
                 "r"(arrivals)
                 : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&word))
                 : "memory");
  }
  // The same where `mine`, without a branch.
  __device__ __forceinline__ void arrive_if(bool mine) {
    asm volatile(
        "{\n"
        ".reg .pred mine;\n"
        "setp.ne.s32 mine, %1, 0;\n"
        "@mine mbarrier.arrive.shared::cta.b64 _, [%0];\n"
        "}\n" ::"r"(shared_address(&word)),
        "r"(static_cast<int>(mine))
        : "memory");
  }
  // Arrives, and makes the phase wait for so many bytes of copies as well.
  __device__ __forceinline__ void arrive_expecting(int bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&word)),
        "r"(bytes)
        : "memory");
  }
  __device__ __forceinline__ void wait(uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n"
        "}\n" ::"r"(shared_address(&word)),
        "r"(parity)
        : "memory");
  }
};

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Orders ordinary accesses to shared memory before later ones by the copy engine and the tensor
// cores; each thread that has written, or read what is then refilled, calls it before the barrier
// that hands the data over.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Tells nvcc that a warp's threads have the same x: a branch on it then leaves uniform registers in
// use.
__device__ __forceinline__ int agreed(int x) { return __shfl_sync(0xffffffffu, x, 0); }
// What a kernel of launch() does before it touches global memory: waits for what the stream holds
// ahead, and lets the launch behind this one begin to do the same.
__device__ __forceinline__ void wait_for_stream() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// What this thread has written, or knows of by barriers, before `flag`; and what was before a value
// that is read from one, for all of the device.
__device__ __forceinline__ void store_release(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
// Barrier `id` (1-15) among `threads` threads of the block.
__device__ __forceinline__ void sync_threads(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Arrives there without waiting.
__device__ __forceinline__ void arrive_threads(int id, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// sync_threads(); returns whether any of them brought true.
__device__ __forceinline__ bool sync_threads_or(int id, int threads, bool value) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.s32 p, %3, 0;\n"
      "barrier.red.or.pred q, %1, %2, p;\n"
      "selp.s32 %0, 1, 0, q;\n"
      "}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(value))
      : "memory");
  return any != 0;
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Two packed elements as floats.
template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t pair);
template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t pair) {
  float2 x;
  asm("{\n.reg .b16 low, high, zero;\nmov.b16 zero, 0;\nmov.b32 {low, high}, %2;\n"
      "mov.b32 %0, {zero, low};\nmov.b32 %1, {zero, high};\n}\n"
      : "=f"(x.x), "=f"(x.y)
      : "r"(pair));
  return x;
}
template <>
__device__ __forceinline__ float2 unpack<__half>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// ---- tensor copies ------------------------------------------------------------------------------

// Has the copy engine fetch a map before it is used.
__device__ __forceinline__ void prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Copies the box of a map over [batch, token, head, column] that starts at the given element.
__device__ __forceinline__ void load_box(void* shared, const CUtensorMap& map, Barrier& full,
                                         int column, int head, int token, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%3, %4, %5, %6}], [%2];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(&full.word)), "r"(column), "r"(head), "r"(token), "r"(batch)
      : "memory");
}
__device__ __forceinline__ void store_box(const CUtensorMap& map, const void* shared, int column,
                                          int head, int token, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          &map),
      "r"(shared_address(shared)), "r"(column), "r"(head), "r"(token), "r"(batch)
      : "memory");
}
// Copies contiguous bytes, a multiple of 16.
__device__ __forceinline__ void load_bytes(void* shared, const void* global, int bytes,
                                           Barrier& full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(&full.word))
      : "memory");
}
__device__ __forceinline__ void store_bytes(void* global, const void* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until at most kPending groups of stores still read shared memory.
template <int kPending>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- tiles in shared memory ---------------------------------------------------------------------

// Tiles are [rows, 64] of 16-bit elements, 128 bytes a row, with the copy engine's 128-byte
// swizzle: 16-byte piece p of row r lies at piece p ^ (r % 8). Their base is 1,024-byte aligned.
inline constexpr int kTileColumns = 64;

__device__ __forceinline__ uint32_t tile_offset(int row, int column) {
  return row * 128 + (((column / 8) ^ (row % 8)) << 4) + column % 8 * 2;
}

// The tensor cores' description of a tile whose rows run along the product's M or N ("K-major").
// Step k of 16 columns starts at +2 k.
__device__ __forceinline__ uint64_t describe_rows(const void* tile) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16) |
         ((shared_address(tile) & 0x3ffff) >> 4);
}
// A tile whose rows run along the product's inner dimension ("MN-major"); the next 64 columns of N
// lie `next_columns` bytes further on. Step k of 16 rows starts at + 128 k.
__device__ __forceinline__ uint64_t describe_columns(const void* tile, int next_columns) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) |
         (static_cast<uint64_t>(next_columns >> 4) << 16) | ((shared_address(tile) & 0x3ffff) >> 4);
}

__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_plain(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit elements that lies across a warp: a packed result of
// mma.sync becomes the operand B of the next.
__device__ __forceinline__ uint32_t transpose(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// e^x to about 1e-7 (1 + |x|), zero where that is not a normal number.
__device__ __forceinline__ float fast_exp(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
  return y;
}

// 1 - e^-x to about 3e-7 of itself for x > -0.5; below, to what fast_exp() gives.
__device__ __forceinline__ float one_minus_exp(float x) {
  float series = fmaf(x, 1.f / 5040, -1.f / 720);
  series = fmaf(x, series, 1.f / 120);
  series = fmaf(x, series, -1.f / 24);
  series = fmaf(x, series, 1.f / 6);
  series = fmaf(x, series, -1.f / 2);
  series = fmaf(x, series, 1.f);
  return fabsf(x) < 0.5f ? x * series : 1.f - fast_exp(-x);
}

// ---- warpgroup matrix products ------------------------------------------------------------------

// D [64, N] += A [64, 16] B [16, N] in float. Registers of thread (warp w, g = lane / 4, t = lane %
// 4): d[4 j + 2 h + e] is row 16 w + g + 8 h, column 8 j + 2 t + e; A is two such 8-column groups
// packed in pairs. Products run asynchronously: fence_products() before the first that uses
// registers written since, commit_products() after the last, wait_products() before results are
// read or operands overwritten.

__device__ __forceinline__ void fence_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Pins registers: the compiler moves no use of them across this point.
template <int kN>
__device__ __forceinline__ void pin(float (&d)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// True for one thread of a warp, always the same, where all ask. nvcc knows that it is one; copies
// by thread 0 it makes loops over all threads that might be there, of a dozen instructions.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(elected));
  return elected != 0;
}
// The same of a warpgroup, `thread` being the number in it.
__device__ __forceinline__ bool elect_one(int thread) { return thread < 32 && elect_one(); }
// Makes a value's origin unknown to the compiler, so that nothing derived from it moves above here.
__device__ __forceinline__ void hide(int& x) { asm volatile("" : "+r"(x)); }
// The same for an index in [0, kLimit): division by powers of two stays a shift.
template <int kLimit>
__device__ __forceinline__ void hide_index(int& x) {
  hide(x);
  __builtin_assume(x >= 0 && x < kLimit);
}
// The thread's number, read anew: what follows from it need not be kept until here.
__device__ __forceinline__ int read_thread() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
template <int kPending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define EFLA_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EFLA_D16(i) EFLA_D4(i), EFLA_D4(i + 4), EFLA_D4(i + 8), EFLA_D4(i + 12)
#define EFLA_D32 EFLA_D16(0), EFLA_D16(16)
#define EFLA_D64 EFLA_D32, EFLA_D16(32), EFLA_D16(48)
#define EFLA_LIST16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define EFLA_LIST32                                                                            \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define EFLA_LIST64                                                                              \
  EFLA_LIST32                                                                                    \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// A in registers, B described; %4 says whether to add to D.
#define EFLA_WGMMA_RS(SHAPE, TYPE, LIST, OUT, A0, A1, A2, A3, B, P, S, SIGN, TRANSPOSE)            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned." SHAPE   \
               ".f32." TYPE "." TYPE " {" LIST "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " B ", p, " S \
               ", 1, " TRANSPOSE ";\n}\n"                                                          \
               : OUT                                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                               \
                 "r"(static_cast<int>(accumulate)), "n"(SIGN))
#define EFLA_WGMMA_SS_WIDE(TYPE)                                                          \
  asm volatile(                                                                           \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned."           \
      "m64n128k16.f32." TYPE "." TYPE " {" EFLA_LIST64 "}, %64, %65, p, 1, 1, 0, 1;\n}\n" \
      : EFLA_D64                                                                          \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))
#define EFLA_WGMMA_SS_NARROW(TYPE)                                                       \
  asm volatile(                                                                          \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned."          \
      "m64n32k16.f32." TYPE "." TYPE " {" EFLA_LIST16 "}, %16, %17, p, 1, 1, 0, 0;\n}\n" \
      : EFLA_D16(0)                                                                      \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))
#define EFLA_WGMMA_SS(TYPE, TRANSPOSE)                                                      \
  asm volatile(                                                                             \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned."             \
      "m64n64k16.f32." TYPE "." TYPE " {" EFLA_LIST32 "}, %32, %33, p, 1, 1, 0, " TRANSPOSE \
      ";\n}\n"                                                                              \
      : EFLA_D32                                                                            \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))

template <typename T>
inline constexpr bool kIsBfloat16 = std::is_same_v<T, __nv_bfloat16>;

// N = 64, A in registers, times kSign (1 or -1), B by rows.
template <typename T, int kSign = 1>
__device__ __forceinline__ void product(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                                        bool accumulate) {
  if constexpr (kIsBfloat16<T>) {
    EFLA_WGMMA_RS("m64n64k16", "bf16", EFLA_LIST32, EFLA_D32, "%32", "%33", "%34", "%35", "%36",
                  "%37", "%38", kSign, "0");
  } else {
    EFLA_WGMMA_RS("m64n64k16", "f16", EFLA_LIST32, EFLA_D32, "%32", "%33", "%34", "%35", "%36",
                  "%37", "%38", kSign, "0");
  }
}
// N = 128, likewise.
template <typename T>
__device__ __forceinline__ void product(float (&d)[64], const uint32_t (&a)[4], uint64_t b,
                                        bool accumulate) {
  if constexpr (kIsBfloat16<T>) {
    EFLA_WGMMA_RS("m64n128k16", "bf16", EFLA_LIST64, EFLA_D64, "%64", "%65", "%66", "%67", "%68",
                  "%69", "%70", 1, "0");
  } else {
    EFLA_WGMMA_RS("m64n128k16", "f16", EFLA_LIST64, EFLA_D64, "%64", "%65", "%66", "%67", "%68",
                  "%69", "%70", 1, "0");
  }
}
// N = 64, A in registers, B by columns.
template <typename T>
__device__ __forceinline__ void product_columns(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                                                bool accumulate) {
  if constexpr (kIsBfloat16<T>) {
    EFLA_WGMMA_RS("m64n64k16", "bf16", EFLA_LIST32, EFLA_D32, "%32", "%33", "%34", "%35", "%36",
                  "%37", "%38", 1, "1");
  } else {
    EFLA_WGMMA_RS("m64n64k16", "f16", EFLA_LIST32, EFLA_D32, "%32", "%33", "%34", "%35", "%36",
                  "%37", "%38", 1, "1");
  }
}
// N = 128, likewise.
template <typename T>
__device__ __forceinline__ void product_columns(float (&d)[64], const uint32_t (&a)[4], uint64_t b,
                                                bool accumulate) {
  if constexpr (kIsBfloat16<T>) {
    EFLA_WGMMA_RS("m64n128k16", "bf16", EFLA_LIST64, EFLA_D64, "%64", "%65", "%66", "%67", "%68",
                  "%69", "%70", 1, "1");
  } else {
    EFLA_WGMMA_RS("m64n128k16", "f16", EFLA_LIST64, EFLA_D64, "%64", "%65", "%66", "%67", "%68",
                  "%69", "%70", 1, "1");
  }
}
// N = 64, A and B by rows.
template <typename T>
__device__ __forceinline__ void product_shared(float (&d)[32], uint64_t a, uint64_t b,
                                               bool accumulate) {
  if constexpr (kIsBfloat16<T>) {
    EFLA_WGMMA_SS("bf16", "0");
  } else {
    EFLA_WGMMA_SS("f16", "0");
  }
}

// N = 32, likewise.
template <typename T>
__device__ __forceinline__ void product_shared(float (&d)[16], uint64_t a, uint64_t b,
                                               bool accumulate) {
  if constexpr (kIsBfloat16<T>) {
    EFLA_WGMMA_SS_NARROW("bf16");
  } else {
    EFLA_WGMMA_SS_NARROW("f16");
  }
}

// N = 64, A by rows, B by columns.
template <typename T>
__device__ __forceinline__ void product_shared_columns(float (&d)[32], uint64_t a, uint64_t b,
                                                       bool accumulate) {
  if constexpr (kIsBfloat16<T>) {
    EFLA_WGMMA_SS("bf16", "1");
  } else {
    EFLA_WGMMA_SS("f16", "1");
  }
}
// N = 128, likewise.
template <typename T>
__device__ __forceinline__ void product_shared_columns(float (&d)[64], uint64_t a, uint64_t b,
                                                       bool accumulate) {
  if constexpr (kIsBfloat16<T>) {
    EFLA_WGMMA_SS_WIDE("bf16");
  } else {
    EFLA_WGMMA_SS_WIDE("f16");
  }
}

#undef EFLA_D4
#undef EFLA_D16
#undef EFLA_D32
#undef EFLA_D64
#undef EFLA_LIST16
#undef EFLA_LIST32
#undef EFLA_LIST64
#undef EFLA_WGMMA_RS
#undef EFLA_WGMMA_SS
#undef EFLA_WGMMA_SS_NARROW
#undef EFLA_WGMMA_SS_WIDE

}  // namespace efla::cuda::sm90
