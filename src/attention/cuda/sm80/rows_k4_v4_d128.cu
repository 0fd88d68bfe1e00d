// The rows kernel for 4-bit keys, 4-bit values, head_dim 128.
#include "src/attention/cuda/sm80/rows_instance.cuh"

KVTILE_ROWS_INSTANCE(KeyCode::kLloydMax4, ValueCode::kUniform4, 128)
