// The rows kernel for FP8 e4b15 keys, 4-bit values, head_dim 64.
#include "src/attention/cuda/sm80/rows_instance.cuh"

KVTILE_ROWS_INSTANCE(KeyCode::kFp8E4B15, ValueCode::kUniform4, 64)
