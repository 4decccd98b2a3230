"""The paged KV cache that every kernel and every rival reads.

Keys and values are pools of pages, addressed as [num_pages, H, PAGE, D] (the HND order of serving engines).  The storage
behind that view is head-major, [H, num_pages, PAGE, D]: one page of one head is one contiguous run either way (4 KB at
D 128), and a sequence whose pages lie side by side is also a plain [N, D] matrix per head, so that kernels which need a
contiguous cache (FlashAttention-3's best case) read the very same bytes.  Kernels take strides and run on both orders.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from locks_kernels.shapes import DecodeShape
from locks_kernels.summary import RecordLayout

TORCH_DTYPE = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class PagedCache:
    """One layer's cache.

    keys, values  shape.dtype  [num_pages, H, PAGE, D]; equal strides, last axis contiguous
    summaries     uint8        [num_pages, H, record_bytes], the heads of a page side by side; valid for complete pages only
    """

    shape: DecodeShape
    keys: torch.Tensor
    values: torch.Tensor
    summaries: torch.Tensor

    @classmethod
    def allocate(cls, shape: DecodeShape, num_pages: int, device: torch.device | str) -> PagedCache:
        """An uninitialised pool of `num_pages` pages, head-major storage."""
        storage = (shape.kv_heads, num_pages, shape.page_size, shape.head_dim)
        dtype = TORCH_DTYPE[shape.dtype]
        keys, values = (torch.empty(storage, dtype=dtype, device=device).transpose(0, 1) for _ in range(2))
        record_bytes = RecordLayout.of(shape).record_bytes
        summaries = torch.empty(num_pages, shape.kv_heads, record_bytes, dtype=torch.uint8, device=device)
        return cls(shape, keys, values, summaries)

    @property
    def num_pages(self) -> int:
        return self.keys.shape[0]


@dataclass
class Sequences:
    """Where each sequence's pages lie and how long it is; shared by all layers of a model.

    block_table  int32 [B, P]  physical page of each logical page
    seq_lens     int32 [B]     tokens, the one being decoded included; lives on the device and may change between replays
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def batch(self) -> int:
        return self.block_table.shape[0]

    @property
    def max_pages(self) -> int:
        return self.block_table.shape[1]
