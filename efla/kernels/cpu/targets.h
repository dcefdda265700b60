// The instruction sets that the CPU kernels are compiled for: the compiler's baseline, AVX2 and
// AVX-512 on x86. The steps between them would double build time and code for machines without AVX2
// only. Include this before any Highway header.
#pragma once

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
