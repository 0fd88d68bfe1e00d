"""float64 attention written out with numpy, and the inputs that the Python tests share."""

import numpy as np

import kvtile


class Case:
    """One cache of several sequences in shuffled pages, and the decoded keys and values."""

    def __init__(self, preset="4bit_nc", seq_lens=(100,), q_lens=(3,), num_heads=4, num_kv_heads=2,
                 head_dim=64, block_size=16, layout="token_major", seed=0, padding=0):
        rng = np.random.default_rng(seed)
        self.format = kvtile.SlotFormat(preset, head_dim)
        self.q_lens = q_lens
        max_blocks = max(-(-n // block_size) for n in seq_lens)
        num_blocks = max_blocks * len(seq_lens) + 3
        inner = (block_size, num_kv_heads)
        inner = inner if layout == "token_major" else inner[::-1]
        pages = np.full((num_blocks, *inner, self.format.slot_bytes + padding), 0xFF, np.uint8)
        self.cache = kvtile.PagedCache(pages, self.format, layout)
        self.block_table = rng.permutation(num_blocks)[:max_blocks * len(seq_lens)].astype(
            np.int32).reshape(len(seq_lens), max_blocks)
        self.seq_lens = np.array(seq_lens, np.int32)
        self.cu_seqlens_q = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        self.query = rng.standard_normal((sum(q_lens), num_heads, head_dim), np.float32)
        self.raw, self.slots, self.decoded = [], [], []
        for s, n in enumerate(seq_lens):
            key, value = rng.standard_normal((2, n, num_kv_heads, head_dim), np.float32)
            t = np.arange(n)
            slots = self.block_table[s, t // block_size].astype(np.int64) * block_size + (
                t % block_size)
            kvtile.encode(key, value, self.cache, slots)
            self.raw.append((key, value))
            self.slots.append(slots)
            self.decoded.append(kvtile.decode(self.cache, slots))

    def chunk(self):
        """Raw keys and values of every row."""
        parts = [[x[n - q:] for x in pair]
                 for pair, n, q in zip(self.raw, self.seq_lens, self.q_lens)]
        return (np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]))

    def attend(self, **options):
        return kvtile.attend(self.query, self.cache, self.block_table, self.seq_lens,
                             self.cu_seqlens_q, return_lse=True, **options)

    def expected(self, causal=True, window=0, softcap=0.0, sinks=None, raw_chunk=False):
        """(out, lse) in float64."""
        num_heads, head_dim = self.query.shape[1:]
        out = np.zeros(self.query.shape)
        lse = np.full((num_heads, len(self.query)), -np.inf)
        for s, (n, q_len) in enumerate(zip(self.seq_lens, self.q_lens)):
            key, value = (x.astype(np.float64) for x in self.decoded[s])
            if raw_chunk:
                for x, raw in zip((key, value), self.raw[s]):
                    x[n - q_len:] = raw[n - q_len:]
            group = num_heads // key.shape[1]
            for i in range(q_len):
                row, position = self.cu_seqlens_q[s] + i, n - q_len + i
                begin = max(0, position - window + 1) if window else 0
                end = position + 1 if causal else n
                for h in range(num_heads):
                    scores = key[begin:end, h // group] @ self.query[row, h].astype(np.float64)
                    scores *= head_dim**-0.5
                    if softcap:
                        scores = softcap * np.tanh(scores / softcap)
                    every = scores if sinks is None else np.append(scores, sinks[h])
                    top = every.max()
                    total = np.exp(every - top).sum()
                    out[row, h] = np.exp(scores - top) / total @ value[begin:end, h // group]
                    lse[h, row] = top + np.log(total)
        return out, lse


def rel_error(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
