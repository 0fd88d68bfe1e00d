// KVTILE_HD marks functions that run on host and device alike, so that a GPU kernel and the CPU
// tests execute the same text.
#pragma once

#if defined(__CUDACC__)
#define KVTILE_HD __host__ __device__
#else
#define KVTILE_HD
#endif
