"""What the comparisons time: one packed sequence in shuffled pages, and attention over several.

Inputs: the kvtile package; KVTILE_LIBRARY names the library it loads.
"""

import numpy as np

import kvtile

WORKSPACE_ALIGNMENT = 64


def aligned_bytes(count):
    """A byte array whose first element is aligned as a workspace must be."""
    raw = np.empty(count + WORKSPACE_ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % WORKSPACE_ALIGNMENT
    return raw[start:start + count]


class PackedSequence:
    """One sequence of num_tokens in a pool of pages handed out in shuffled order."""

    def __init__(self, preset, num_tokens, num_kv_heads, head_dim, block_size=16, seed=0):
        self.num_tokens = num_tokens
        self.num_kv_heads = num_kv_heads
        num_blocks = -(-num_tokens // block_size)
        self.cache = kvtile.PagedCache.zeros(num_blocks, block_size, num_kv_heads,
                                             kvtile.SlotFormat(preset, head_dim))
        self.block_table = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
        tokens = np.arange(num_tokens)
        self.slots = (self.block_table[tokens // block_size].astype(np.int64) * block_size +
                      tokens % block_size)

    def encode(self, key, value, num_threads=0):
        """key, value: [num_tokens, num_kv_heads, head_dim]."""
        kvtile.encode(key, value, self.cache, self.slots, num_threads=num_threads)

    def decode(self, key, value, unrotate_keys=True, num_threads=0):
        kvtile.decode(self.cache, self.slots, key=key, value=value, unrotate_keys=unrotate_keys,
                      num_threads=num_threads)


class Attention:
    """attend() of one sequence, fp32, over any of several sequences of the same shape.

    chunk: (key, value) of the last q_len tokens, read raw; None means that they are in the cache.
    """

    def __init__(self, sequences, query, chunk=None, causal=True, num_threads=1):
        q_len, num_heads, head_dim = query.shape
        seq_len = sequences[0].num_tokens + (q_len if chunk else 0)
        self.sequences = sequences
        self.query = query
        self.out = np.empty_like(query)
        self.lse = np.empty((num_heads, q_len), np.float32)
        self.chunk = chunk
        self.causal = causal
        self.softmax_scale = head_dim**-0.5
        self.report = kvtile.RunReport()
        cache = sequences[0].cache
        # A raw chunk needs no pages of its own, but the table must cover every position.
        num_blocks = -(-seq_len // cache.block_size)
        self._tables = [np.resize(s.block_table, (1, num_blocks)) for s in sequences]
        self._seq_lens = np.array([seq_len], np.int32)
        self.workspace_bytes = kvtile.workspace_bytes(
            cache.format, total_q=q_len, num_heads=num_heads, num_kv_heads=cache.num_kv_heads,
            block_size=cache.block_size, dtype="float32", chunk=chunk is not None, causal=causal,
            num_threads=num_threads)
        key, value = chunk or (None, None)
        self._options = dict(
            cu_seqlens_q=np.array([0, q_len], np.int32), causal=causal, chunk_key=key,
            chunk_value=value, out=self.out, lse=self.lse, num_threads=num_threads,
            workspace=aligned_bytes(self.workspace_bytes), report=self.report)
        self._next = 0

    def run(self, index=None):
        """Runs over the named sequence, or over the next one in turn."""
        if index is None:
            index = self._next
            self._next = (self._next + 1) % len(self.sequences)
        kvtile.attend(self.query, self.sequences[index].cache, self._tables[index],
                      self._seq_lens, **self._options)

    def flops(self):
        """4 * head_dim * num_heads for each visible (query, key) pair."""
        q_len, num_heads, head_dim = self.query.shape
        seq_len = int(self._seq_lens[0])
        hidden = q_len * (q_len - 1) // 2 if self.causal else 0
        return 4 * head_dim * num_heads * (q_len * seq_len - hidden)
