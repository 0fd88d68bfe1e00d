"""kvtile.hf on small models with random weights: Llama with one window for all layers or none, and
Gemma 3 with window layers and head_dim 256."""

import copy

import pytest
import torch
from transformers import DynamicCache, Gemma3ForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.gemma3 import Gemma3TextConfig

import kvtile
import kvtile.hf

SHAPE = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=None,
             pad_token_id=0)


SLIDING, FULL = "sliding_attention", "full_attention"


def llama(layers=2):
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=layers, head_dim=64, **SHAPE)
    return LlamaForCausalLM._from_config(config, attn_implementation="kvtile").eval()


def gemma3(layers=(SLIDING, SLIDING, FULL), **changes):
    torch.manual_seed(0)
    config = Gemma3TextConfig(**{**SHAPE, "num_key_value_heads": 1, **changes},
                              num_hidden_layers=len(layers), head_dim=256, sliding_window=40,
                              query_pre_attn_scalar=256, layer_types=list(layers))
    return Gemma3ForCausalLM._from_config(config, attn_implementation="kvtile").eval()


def ids(tokens, batch=1):
    return torch.randint(2, 300, (batch, tokens), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def logits(model, tokens, cache, chunks):
    parts, start = [], 0
    for chunk in chunks:
        parts.append(model(tokens[:, start:start + chunk], past_key_values=cache).logits)
        start += chunk
    return torch.cat(parts, dim=1)


class RoundTrip(DynamicCache):
    """What a packed cache holds, kept decoded, for a dense attention to read."""

    def __init__(self, preset, raw_rows=129):
        super().__init__()
        self.preset, self.raw_rows = preset, raw_rows

    def update(self, key, value, layer_idx, *args, **kwargs):
        cached = self.get_seq_length(layer_idx)
        past = ([self.layers[layer_idx].keys, self.layers[layer_idx].values] if cached else
                [key[:, :, :0], value[:, :, :0]])
        stored = super().update(*self.decoded(key, value), layer_idx)
        if cached and key.shape[2] < self.raw_rows:
            return stored
        return tuple(torch.cat(pair, dim=2) for pair in zip(past, (key, value)))

    def decoded(self, key, value):
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (key, value)]
        tokens, heads, head_dim = rows[0].shape
        cache = kvtile.PagedCache.zeros(tokens, 1, heads, kvtile.SlotFormat(self.preset, head_dim),
                                        device="cpu")
        kvtile.encode(*rows, cache, torch.arange(tokens))
        return [x.view(key.shape[0], -1, heads, head_dim).transpose(1, 2)
                for x in kvtile.decode(cache, torch.arange(tokens))]


def dense(model, tokens, chunks, cache):
    model = copy.deepcopy(model)
    model.set_attn_implementation("sdpa")
    return logits(model, tokens, cache, chunks)


def rel_error(got, want):
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("preset", kvtile.presets())
@pytest.mark.parametrize("make", (
    # One layer: behind it, rounding in the other engine's last bit may flip a code of the next.
    lambda: llama(1), lambda: gemma3([SLIDING]), lambda: gemma3([FULL])))
def test_logits_are_those_of_dense_attention_over_the_decoded_cache(make, preset):
    model, tokens, chunks = make(), ids(350, batch=2), (100, 130, 60, 50, 9, 1)
    for raw_rows in (1, 129):
        cache = kvtile.hf.PackedCache(model.config, preset, raw_rows=raw_rows)
        got = logits(model, tokens, cache, chunks)
        want = dense(model, tokens, chunks, RoundTrip(preset, raw_rows))
        assert rel_error(got, want) < 1e-5
        assert cache.get_seq_length() == 350
    # The packing itself is what is left, and the first chunk does not see any.
    plain = dense(model, tokens, chunks, DynamicCache(config=model.config))
    assert rel_error(got[:, :100], plain[:, :100]) < 1e-5
    assert 1e-3 < rel_error(got[:, 100:], plain[:, 100:]) < 0.5


@pytest.mark.parametrize("raw_rows", (1, 129))
def test_window_layers_give_pages_back(raw_rows, monkeypatch):
    """What a window layer keeps is bounded, and the bits are those of keeping everything."""
    model, tokens = gemma3(), ids(333)
    chunks = (130, 7, 90, 1, 1, 50, 33, 20, 1)
    cache = kvtile.hf.PackedCache(model.config, block_size=8, raw_rows=raw_rows)
    got = logits(model, tokens, cache, chunks)
    everything = kvtile.hf.PackedCache(model.config, block_size=8, raw_rows=raw_rows)
    for layer in everything.layers:
        layer.window = 0
    assert torch.equal(logits(model, tokens, everything, chunks), got)
    slot = kvtile.SlotFormat("4bit_nc", 256).slot_bytes
    held = [layer.nbytes // (8 * slot) for layer in cache.layers]
    assert held[2] == -(-333 // 8) and max(held[:2]) <= -(-40 // 8) + 1
    assert cache.nbytes == sum(held) * 8 * slot


def test_generate_and_copies():
    model, tokens = llama(), ids(40, batch=2)
    cache = kvtile.hf.PackedCache(model.config, "k8v4")
    logits(model, tokens[:, :30], cache, (30,))
    twin = copy.deepcopy(cache)
    options = dict(max_new_tokens=8, do_sample=False)
    first = model.generate(tokens, past_key_values=cache, **options)
    assert first.shape == (2, 48)
    assert torch.equal(model.generate(tokens, past_key_values=twin, **options), first)
    cache.reset()
    assert cache.get_seq_length() == 0
    whole = model.generate(tokens, past_key_values=cache, **options)
    assert whole.shape == (2, 48)


def test_soft_cap_is_computed():
    plain, capped = gemma3(), gemma3(attn_logit_softcapping=0.5)
    capped.load_state_dict(plain.state_dict())
    tokens = ids(50)
    outputs = [logits(m, tokens, kvtile.hf.PackedCache(m.config), (50,)) for m in (plain, capped)]
    assert rel_error(outputs[1], outputs[0]) > 1e-4
    eager = copy.deepcopy(plain)
    eager.set_attn_implementation("eager")
    from transformers.models.gemma3 import modeling_gemma3
    original = modeling_gemma3.eager_attention_forward
    try:
        modeling_gemma3.eager_attention_forward = (
            lambda *args, **kwargs: original(*args, **{**kwargs, "softcap": 0.5}))
        with torch.inference_mode():
            want = eager(tokens).logits
    finally:
        modeling_gemma3.eager_attention_forward = original
    assert rel_error(outputs[1], want) < 1e-5


def test_what_is_not_computed_is_refused_by_name():
    model, tokens = llama(), ids(20)

    def cache():
        return kvtile.hf.PackedCache(model.config)

    with pytest.raises(kvtile.InvalidArgument, match="^past_key_values: got another cache"):
        model(tokens)
    padded = torch.ones(1, 20, dtype=torch.long)
    padded[0, 0] = 0
    with pytest.raises(kvtile.Unsupported, match="^attention_mask: got padding"):
        model(tokens, attention_mask=padded, past_key_values=cache())
    with pytest.raises(kvtile.Unsupported, match="^attention_mask: got a mask tensor"):
        model(tokens, attention_mask=torch.zeros(1, 1, 20, 20), past_key_values=cache())
    with pytest.raises(kvtile.Unsupported, match="reorder, crop"):
        cache().crop(5)
    model.set_attn_implementation("sdpa")
    with pytest.raises(kvtile.InvalidArgument, match="^attn_implementation: got sdpa"):
        cache()
    model.set_attn_implementation("kvtile")
    with pytest.raises(kvtile.Unsupported, match="^head_dim"):
        odd = LlamaForCausalLM._from_config(
            LlamaConfig(num_hidden_layers=1, head_dim=48, **SHAPE), attn_implementation="kvtile")
        odd(tokens, past_key_values=kvtile.hf.PackedCache(odd.config))
    logits(model, tokens, cache(), (20,))
