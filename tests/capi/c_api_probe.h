/* Store `tokens` keys and values of 2 heads (head_dim 64, fp32) and attend to them with one query
 * row of 4 heads; all through the C ABI. */
#ifndef KVTILE_TESTS_CAPI_C_API_PROBE_H_
#define KVTILE_TESTS_CAPI_C_API_PROBE_H_

#include "kvtile/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

kvtile_status kvtile_probe(const float* key, const float* value, const float* query, int tokens,
                           float* out, float* lse);

#ifdef __cplusplus
}
#endif
#endif /* KVTILE_TESTS_CAPI_C_API_PROBE_H_ */
