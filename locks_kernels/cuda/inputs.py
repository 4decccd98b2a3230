"""What the CUDA kernels take on trust, checked on the host: types, sizes, and memory laid out as they read it."""

from __future__ import annotations

import torch

from locks_kernels.cache import TORCH_DTYPE, PagedCache, Sequences
from locks_kernels.shapes import ShapeError
from locks_kernels.summary import RecordLayout

LOAD_BYTES = 16  # of the widest load; what it reads must start at a multiple


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    size: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    rows_apart: bool = False,
) -> None:
    """ShapeError unless `tensor` is all that the arguments say, and contiguous; `rows_apart`: only from its second axis on."""
    whole = tensor[0] if rows_apart and len(tensor) else tensor
    start_bytes = tensor.stride(0) * tensor.element_size() if rows_apart else 0
    if (
        (tensor.shape, tensor.dtype, tensor.device) != (size, dtype, device)
        or not whole.is_contiguous()
        or (tensor.element_size() < 4 and (tensor.data_ptr() % LOAD_BYTES or start_bytes % LOAD_BYTES))
    ):
        raise ShapeError(
            f"{name} must be contiguous {dtype} {size} on {device}, aligned to {LOAD_BYTES} bytes; it is {tensor.dtype} "
            f"{tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}: convert it with .to(...).contiguous()"
        )


def check_token(cache: PagedCache, batch: int, **tensors: torch.Tensor) -> None:
    """ShapeError unless "query" and "out" are [B, HQ, D], "keys" and "values" of new tokens [B, H, D], all in the cache's type.
    Rows of inputs may be those of a fused projection."""
    shape, pool = cache.shape, cache.keys
    for name, tensor in tensors.items():
        heads = shape.kv_heads if name in ("keys", "values") else shape.query_heads
        check_tensor(name, tensor, (batch, heads, shape.head_dim), pool.dtype, pool.device, rows_apart=name != "out")


def check_cache(cache: PagedCache, sequences: Sequences) -> None:
    """ShapeError unless the kernels can read the cache and the sequences' tables."""
    shape, device = cache.shape, cache.keys.device
    for name, pool in (("keys", cache.keys), ("values", cache.values)):
        size = (cache.num_pages, shape.kv_heads, shape.page_size, shape.head_dim)
        *strides, last = pool.stride()
        if (
            (pool.shape, pool.dtype, pool.device, pool.stride())
            != (size, TORCH_DTYPE[shape.dtype], device, cache.keys.stride())
            or last != 1
            or any(stride * pool.element_size() % LOAD_BYTES for stride in strides)
            or pool.data_ptr() % LOAD_BYTES
        ):
            raise ShapeError(
                f"the cache's {name} must be {shape.dtype} {size} on {device} with the strides of its keys, the last axis "
                f"contiguous and rows aligned to {LOAD_BYTES} bytes; got {pool.dtype} {tuple(pool.shape)} with strides "
                f"{pool.stride()} on {pool.device}: see PagedCache.allocate"
            )
    record = RecordLayout.of(shape).record_bytes
    check_tensor("summaries", cache.summaries, (cache.num_pages, shape.kv_heads, record), torch.uint8, device, rows_apart=True)
    check_tensor("block_table", sequences.block_table, (sequences.batch, sequences.max_pages), torch.int32, device)
    check_tensor("seq_lens", sequences.seq_lens, (sequences.batch,), torch.int32, device)
