// The rows kernel for FP8 e4m3 keys, 4-bit values, head_dim 256.
#include "src/attention/cuda/sm80/rows_instance.cuh"

KVTILE_ROWS_INSTANCE(KeyCode::kFp8E4M3, ValueCode::kUniform4, 256)
