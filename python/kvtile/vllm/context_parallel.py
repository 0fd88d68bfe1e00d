"""Decode context parallelism: each rank's cache holds a share of a request's tokens.

A rank attends the rows of every rank's heads over its own share; the states (out, lse) are
exchanged and merge exactly. The rows' own tokens, whose keys and values every rank computes, are a
state of their own, read raw: in the cache each of them is on one rank only.
"""

import dataclasses

import torch
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

import kvtile
from kvtile.vllm import host


@dataclasses.dataclass(frozen=True)
class Share:
    """What a batch reads on this rank. A row sees all of its request's cached tokens here, so a
    request may be split: no piece has more rows than tokens, which attend() asks of a sequence."""

    block_table: torch.Tensor  # [pieces, max_blocks]
    seq_lens: torch.Tensor  # [pieces] cached tokens on this rank
    cu_seqlens_q: torch.Tensor  # [pieces + 1]
    chunk_lens: torch.Tensor  # [requests] rows of each request


def share_of(batch, starts, world_size, rank, interleave):
    """The Share of a batch. starts: its query_start_loc as a list of ints."""
    lens = torch.diff(batch.query_start_loc)
    local = get_dcp_local_seq_lens(batch.seq_lens - lens, world_size, rank, interleave)
    # On the host lengths of verify rows are upper bounds, those of prefill rows exact.
    known = get_dcp_local_seq_lens(
        batch.seq_lens_cpu_upper_bound - torch.diff(batch.query_start_loc_cpu), world_size, rank,
        interleave).tolist()
    requests, edges = [], [0]
    for request, (begin, end) in enumerate(zip(starts, starts[1:])):
        rows = end - begin
        step = 1 if rows < host.RAW_CHUNK_ROWS else known[request] or rows
        pieces = [*range(begin + step, end, step), end] if rows else []
        requests += [request] * len(pieces)
        edges += pieces
    device = batch.seq_lens.device
    index = torch.tensor(requests, dtype=torch.int64).to(device)
    return Share(batch.block_table_tensor[index], local[index].to(torch.int32),
                 torch.tensor(edges, dtype=torch.int32).to(device), lens.to(torch.int32))


def attend(impl, query, key, value, cache, metadata, out, workspace, num_threads):
    """Writes the attention of [rows, num_heads, head_dim] queries to out, on every rank at once."""
    share, group = metadata.share, get_dcp_group()
    options = dict(softmax_scale=impl.scale, softcap=impl.softcap, workspace=workspace,
                   num_threads=num_threads, return_lse=True)
    states = [kvtile.attend(
        query, cache, metadata.block_table, share.chunk_lens, metadata.query_start_loc,
        chunk_key=key, chunk_value=value, max_q_len=metadata.max_query_len, **options)]
    everyone = group.all_gather(query.contiguous(), dim=1)
    part, lse = kvtile.attend(
        everyone, cache, share.block_table, share.seq_lens, share.cu_seqlens_q, causal=False,
        max_q_len=metadata.max_query_len, max_seq_len=metadata.max_seq_len, **options)
    heads = slice(impl.dcp_rank * impl.num_heads, (impl.dcp_rank + 1) * impl.num_heads)
    parts = group.all_gather(part, dim=0).chunk(impl.dcp_world_size)
    lses = group.all_gather(lse, dim=0).chunk(impl.dcp_world_size)
    states += [(part[:, heads], lse[heads]) for part, lse in zip(parts, lses)]
    kvtile.merge_states([(part.float(), lse) for part, lse in states], out=out,
                        num_threads=num_threads)
