"""Sampled self-check: one attention call in KVTILE_VLLM_SELF_CHECK is done again in float64.

Of the sampled call, the last row of one request is compared with float64 attention over the decoded
bytes. A difference is logged as an error and counted; the served result is not touched. Off by
default; on a GPU it waits for the device, so captured graphs are left out.
"""

import logging

import torch

import kvtile
from kvtile.vllm import host

logger = logging.getLogger("vllm.kvtile")

# Largest difference relative to the largest visible value, by bits of the output dtype.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
MAX_TOKENS = 65536
counts = {"calls": 0, "checked": 0, "skipped": 0, "failed": 0}


def sample(call, out):
    """Counts a call of attend() (its arguments and its result) and checks it if it is its turn."""
    every = host.self_check_interval()
    if not every:
        return
    counts["calls"] += 1
    if counts["calls"] % every or (out.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    starts, lens = call["cu_seqlens_q"].tolist(), call["seq_lens"].tolist()
    requests = [i for i, seq_len in enumerate(lens)
                if starts[i] < starts[i + 1] and seq_len <= MAX_TOKENS]
    if not requests:
        counts["skipped"] += 1
        return
    request = requests[counts["checked"] % len(requests)]
    row = starts[request + 1] - 1
    wanted, largest = last_row(call, request, row, starts[request + 1] - starts[request],
                               lens[request])
    error = (out[row].double() - wanted).abs().max().item() / largest
    counts["checked"] += 1
    if error > TOLERANCE[out.dtype] or error != error:
        counts["failed"] += 1
        logger.error("kvtile self-check %d: relative error %.2e over %d tokens, wanted at most "
                     "%.2e (%s)", counts["checked"], error, lens[request], TOLERANCE[out.dtype],
                     counts)
    else:
        logger.info("kvtile self-check %d: relative error %.2e over %d tokens (%s)",
                    counts["checked"], error, lens[request], counts)


def last_row(call, request, row, q_len, seq_len):
    """Float64 attention of a request's last row: ([num_heads, head_dim], largest visible value)."""
    cache, query = call["cache"], call["query"]
    begin = max(0, seq_len - call["window"]) if call["window"] else 0
    positions = torch.arange(begin, seq_len, device=query.device)
    blocks = call["block_table"][request].long()[positions // cache.block_size]
    key, value = (x.double() for x in kvtile.decode(
        cache, blocks * cache.block_size + positions % cache.block_size))
    if call["chunk_key"] is not None:
        own = min(q_len, seq_len - begin)
        for packed, raw in ((key, call["chunk_key"]), (value, call["chunk_value"])):
            packed[len(packed) - own:] = raw[row + 1 - own:row + 1].double()
    group = query.shape[1] // cache.num_kv_heads
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("hd,khd->hk", query[row].double(), key) * call["softmax_scale"]
    if call["softcap"]:
        scores = call["softcap"] * torch.tanh(scores / call["softcap"])
    if call["sinks"] is not None:
        scores = torch.cat([scores, call["sinks"].double()[:, None]], dim=1)
    weights = torch.softmax(scores, dim=1)[:, :seq_len - begin]
    return torch.einsum("hk,khd->hd", weights, value), value.abs().max().item() or 1.0
