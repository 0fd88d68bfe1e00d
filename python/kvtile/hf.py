"""transformers on a packed cache: `PackedCache`, and attention registered under the name "kvtile".

    import kvtile.hf
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="kvtile")
    model.generate(**inputs, past_key_values=kvtile.hf.PackedCache(model.config, "4bit_nc"))

For decoder models whose layers call transformers' attention interface with plain causal or
sliding-window attention: the Llama and Gemma families are tested. Whatever else a layer asks for
(padding, dropout, attention weights, chunked or bidirectional masks, shared layers) is refused by
name; nothing is ignored.
"""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import kvtile
from kvtile.errors import InvalidArgument, Unsupported

NAME = "kvtile"


class PackedLayer(CacheLayerMixin):
    """One layer's packed slots in pages of its own pool, block tables for the whole batch.

    A window layer gives back the pages that no later row can see.
    """

    def __init__(self, preset, window, block_size, raw_rows, fp8, num_threads):
        super().__init__()
        self.is_sliding = window > 0
        self.window = window
        self._preset, self._fp8 = preset, fp8
        self._block_size, self._raw_rows, self._num_threads = block_size, raw_rows, num_threads
        self.reset()

    def reset(self):
        self.is_initialized = False
        self.seq_len = 0  # tokens seen, the chunk in flight included
        self._stored = 0  # tokens whose slots are written, or that no later row can see
        self._first = 0  # position of the tables' first token
        self._free = []
        self._cache = None

    def lazy_initialization(self, key_states, value_states=None):
        self._batch, num_kv_heads, _, head_dim = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        format = kvtile.SlotFormat(self._preset, head_dim, self._fp8)
        self._cache = kvtile.PagedCache.zeros(0, self._block_size, num_kv_heads, format,
                                              device=self.device)
        self._table = torch.empty((self._batch, 0), dtype=torch.int32, device=self.device)
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Hands the chunk on with this layer attached; attend() stores it."""
        if not self.is_initialized:
            self.lazy_initialization(key_states)
        if self._stored != self.seq_len:
            raise InvalidArgument("attn_implementation: got one that does not read the packed "
                                  f"cache, wanted {NAME}")
        self.seq_len += key_states.shape[2]
        # A view of its own: the attribute must not outlive this call on the model's tensor.
        key_states = key_states.view_as(key_states)
        key_states.kvtile_layer = self
        return key_states, value_states

    def attend(self, query, key, value, *, window, **options):
        """[batch, q_len, num_heads, head_dim] of query, key, value [batch, heads, q_len, ...]."""
        batch, num_heads, q_len, head_dim = query.shape
        cached_len = self.seq_len - q_len
        if window and self.window not in (0, window):
            raise InvalidArgument(f"sliding_window: got {window}, wanted the config's "
                                  f"{self.window}")
        if self.window and not window:
            raise InvalidArgument(f"sliding_window: got none, wanted the config's {self.window}")
        raw = cached_len == 0 or q_len >= self._raw_rows
        if not raw:
            self._store(key, value, cached_len, next_row=cached_len)
        chunk = {"chunk_key": _rows(key), "chunk_value": _rows(value)} if raw else {}
        first = None
        if self._first:
            first = torch.full((batch,), self._first, dtype=torch.int32, device=self.device)
        out = kvtile.attend(
            _rows(query), self._cache, self._table,
            torch.full((batch,), self.seq_len, dtype=torch.int32, device=self.device),
            window=window, first_positions=first, num_threads=self._num_threads, max_q_len=q_len,
            max_seq_len=self.seq_len, **chunk, **options)
        if raw:
            self._store(key, value, cached_len, next_row=self.seq_len)
        self._stored = self.seq_len
        return out.view(batch, q_len, num_heads, head_dim)

    def _store(self, key, value, start, next_row):
        """Packs the tokens from `start` on that a row at next_row or later can see."""
        size = self._block_size
        end = start + key.shape[2]
        seen = max(0, next_row - self.window + 1) if self.window else 0
        first = max(self._first, seen // size * size)
        gone = min((first - self._first) // size, self._table.shape[1])
        self._free += self._table[:, :gone].flatten().tolist()
        missing = -(-(end - first) // size) - (self._table.shape[1] - gone)
        self._table = torch.cat([self._table[:, gone:], self._take(missing)], dim=1)
        self._first = first
        begin = max(start, first)
        position = torch.arange(begin, end, device=self.device)
        pages = self._table[:, (position - first) // size]
        slots = pages.long() * size + position % size
        kvtile.encode(_rows(key[:, :, begin - start:]), _rows(value[:, :, begin - start:]),
                      self._cache, slots.flatten(), num_threads=self._num_threads)

    def _take(self, count):
        """[batch, count] free pages, from a larger pool if need be."""
        wanted = self._batch * max(count, 0)
        old = self._cache.num_blocks
        if wanted > len(self._free):
            # Growing by an eighth keeps the copies few and the slack small.
            more = max(wanted - len(self._free), old // 8)
            cache = kvtile.PagedCache.zeros(
                old + more, self._block_size, self._cache.num_kv_heads, self._cache.format,
                device=self.device)
            cache.pages[:old] = self._cache.pages
            self._cache = cache
            self._free += range(old, old + more)
        taken, self._free = self._free[:wanted], self._free[wanted:]
        return torch.tensor(taken, dtype=torch.int32, device=self.device).view(self._batch, -1)

    @property
    def nbytes(self):
        """Bytes of the pages in use."""
        return 0 if self._cache is None else self._table.numel() * self._cache.page_bytes

    def get_seq_length(self):
        return self.seq_len

    def get_mask_sizes(self, cache_position):
        q_len = cache_position if isinstance(cache_position, int) else cache_position.shape[0]
        return self.seq_len + q_len, 0

    def get_max_length(self):
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5

    def _refuse(self, *args, **kwargs):
        raise Unsupported("past_key_values: got a request to reorder, crop, repeat, select or "
                          "offload a packed cache, wanted to extend or reset it")

    reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _refuse
    offload = prefetch = _refuse


class PackedCache(Cache):
    """A cache of packed slots for `model(..., past_key_values=cache)` and `model.generate`.

    config: the model's; its attention implementation must be "kvtile". preset, fp8: SlotFormat's.
    block_size: tokens a page. raw_rows: a chunk of at least so many tokens, and a sequence's first
    chunk, reads its own keys and values raw and is packed afterwards; a shorter one (decode,
    verify) is packed first and read packed, as vLLM does with its own default of 129.
    num_threads: CPU threads, 0 = all. `nbytes` counts the pages in use.
    """

    def __init__(self, config, preset: str = "4bit_nc", *, block_size: int = 16,
                 raw_rows: int = 129, fp8: str = "e4m3", num_threads: int = 0):
        text = config.get_text_config(decoder=True)
        got = getattr(text, "_attn_implementation", None)
        if got != NAME:
            raise InvalidArgument(f"attn_implementation: got {got}, wanted {NAME}")
        if getattr(text, "num_kv_shared_layers", 0):
            raise Unsupported(f"num_kv_shared_layers: got {text.num_kv_shared_layers}, wanted 0")
        window = getattr(text, "sliding_window", None) or 0
        kinds = getattr(text, "layer_types", None)
        if kinds is None:
            kinds = [("sliding" if window else "full") + "_attention"] * text.num_hidden_layers
        for kind in kinds:
            if kind not in ("sliding_attention", "full_attention"):
                raise Unsupported(f"layer_types: got {kind}, wanted full_attention or "
                                  "sliding_attention")
        super().__init__(layers=[
            PackedLayer(preset, window if kind == "sliding_attention" else 0, block_size, raw_rows,
                        fp8, num_threads) for kind in kinds])

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


def _rows(x):
    """[batch, heads, tokens, d] as [batch * tokens, heads, d]; a view when batch is 1."""
    return x.transpose(1, 2).flatten(0, 1)


# Arguments that change what attention computes and that kvtile does not compute.
_REFUSED = ("output_attentions", "head_mask", "position_bias", "attention_bias")


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0,
              sliding_window=None, softcap=None, s_aux=None, **kwargs):
    """The function registered as "kvtile": (output [batch, q_len, num_heads, head_dim], None)."""
    layer = getattr(key, "kvtile_layer", None)
    if layer is None:
        raise InvalidArgument("past_key_values: got another cache, wanted a kvtile.hf.PackedCache")
    if attention_mask is not None:
        raise Unsupported("attention_mask: got a mask tensor, wanted none")
    if dropout:
        raise Unsupported(f"dropout: got {dropout}, wanted 0")
    for name in _REFUSED:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise Unsupported(f"{name}: got a value, wanted none")
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise Unsupported("is_causal: got False, wanted True")
    if softcap is None:
        softcap = getattr(module, "attn_logit_softcapping", None)
    out = layer.attend(query, key, value, window=sliding_window or 0, softmax_scale=scaling,
                       softcap=softcap or 0.0, sinks=None if s_aux is None else s_aux.float())
    return out, None


def _mask(*args, attention_mask=None, **kwargs):
    """No mask is built: attend() knows causality and window. Padding is refused."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise Unsupported("attention_mask: got padding, wanted sequences of one length")


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _mask)
