// The rows kernel for 3-bit keys, 3-bit values, head_dim 128.
#include "src/attention/cuda/sm80/rows_instance.cuh"

KVTILE_ROWS_INSTANCE(KeyCode::kLloydMax3, ValueCode::kUniform3, 128)
