"""One engine of vLLM in a process of its own: reads a request as JSON, prints what it served.

stdin: model folder, engine arguments, waves (lists of prompts served together). The answer is the
last line of stdout.
"""

import json
import sys


def main():
    asked = json.load(sys.stdin)
    from vllm import LLM, SamplingParams

    llm = LLM(model=asked["model"], dtype="float32", enforce_eager=True, seed=0, **asked["engine"])
    config = llm.llm_engine.vllm_config
    sampling = SamplingParams(temperature=0, max_tokens=asked["new_tokens"], ignore_eos=True)
    waves = []
    for prompts in asked["waves"]:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling,
                               use_tqdm=False)
        waves.append([{"tokens": list(o.outputs[0].token_ids), "hit": o.num_cached_tokens}
                      for o in outputs])
    print(json.dumps({
        "waves": waves, "capacity": config.cache_config.num_gpu_blocks *
        config.cache_config.block_size, "skipped": config.cache_config.kv_cache_dtype_skip_layers}))


if __name__ == "__main__":
    main()
