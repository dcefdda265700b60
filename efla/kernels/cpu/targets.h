// The instruction sets that the CPU kernels are compiled for: plain C++, AVX2 and AVX-512 on x86;
// whatever Highway offers elsewhere. The steps between them would double build time and code for
// machines older than AVX2. The register tiles are arrays of vectors, which the sizeless vectors of
// SVE and RISC-V do not allow: Arm uses NEON. Include this before any Highway header.
#pragma once

#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
