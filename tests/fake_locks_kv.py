"""A stand-in for the package `locks-kv`: the modules, names and layouts that the backend drives, in plain torch.

Its scorer and selection notice the environment they run in (`seen`), as the real ones read their flags there.
"""

from __future__ import annotations

from pathlib import Path

FILES = {
    "__init__.py": "",
    "backend/__init__.py": "raise ImportError('No module named vllm')",
    "backend/_runtime.py": "TAG = ''",
    "selection/__init__.py": "",
    "attention/__init__.py": "",
    "selection/rki4_state.py": """
import os
import torch

RECORDS = bool(os.environ.get("RKI4_MMA_AOS"))

class Rki4State:
    def __init__(self, device, *, num_layers, num_blocks, n_kv, G, head_dim, page, max_reqs, max_pages, budget_pages,
                 sink_pages, window_pages):
        self.L, self.n_kv, self.G, self.d, self.page, self.max_pages = num_layers, n_kv, G, head_dim, page, max_pages
        self.budget_pages, self.sink_pages, self.window_pages, self.zsplit = budget_pages, sink_pages, window_pages, None
        lead, bf16 = (num_layers, num_blocks, n_kv), torch.bfloat16
        self.slabs = (
            torch.zeros(*lead, 8, head_dim // 2, dtype=torch.uint8), torch.zeros(*lead, 8, dtype=bf16),
            torch.zeros(*lead, page, 8, dtype=torch.int8), torch.zeros(*lead, page, dtype=bf16),
            torch.zeros(*lead, head_dim, dtype=torch.int8), torch.zeros(*lead, dtype=bf16),
        )
        self.page_table = torch.full((max_reqs, n_kv, max_pages), 7, dtype=torch.int32)
        self.page_cnt = torch.zeros(max_reqs, n_kv, dtype=torch.int32)

    def layer_state(self, layer):
        return (*(slab[layer] for slab in self.slabs), None)

    def bytes_per_layer(self):
        return sum(slab[0].nbytes for slab in self.slabs)
""",
    "selection/rki4_build.py": """
import torch

def rki4_build_bulk(st, layers, table, lengths, n_req, max_fin, chunk_pairs):
    for layer, keys in enumerate(layers):  # [NB, PAGE, H, D]
        ids = table[:n_req, :max_fin].reshape(-1).long()
        pages = keys[ids].permute(0, 2, 1, 3).float()
        centroid = pages.mean(2)
        u, s, v = torch.linalg.svd(pages - centroid[:, :, None], full_matrices=False)
        u, s, v = (part.flip(axis) for part, axis in ((u[..., :8], -1), (s[..., :8], -1), (v[:, :, :8], -2)))
        def quantised(x, bound, axis):
            scale = (x.abs().amax(axis) / bound).clamp_min(1e-8).bfloat16()
            return (x / scale.float().unsqueeze(axis)).round().clamp(-bound, bound).to(torch.int8), scale
        basis, basis_scale = quantised(v, 7, -1)
        nibbles = (basis & 15).to(torch.uint8)
        packed = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
        found = (packed, basis_scale, *quantised(u * s[..., None, :], 127, -1), *quantised(centroid, 127, -1))
        for slab, part in zip(st.slabs, found):
            slab[layer, ids] = part
""",
    "selection/select.py": """
def derive_page_params(st, lengths, n_req):
    st.n_pages = -(-lengths // st.page)
""",
    "selection/rki4_score_cuda.py": """
import os
import torch
from ..backend import _runtime

seen = []

def _get():
    from torch.utils.cpp_extension import load_inline
    return load_inline(name="score" + _runtime.TAG, cpp_sources="", cuda_sources="")

def notice(stage):
    seen.append((stage, os.environ.get("RKI4_MMA_AOS")))

def rki4_score_only(st, layer, q, table, lengths, n_req, scale):
    notice("score")
    v4, vs, c8, cs, mu8, mus, _ = st.layer_state(layer)
    basis = torch.stack((v4 & 15, v4 >> 4), -1).flatten(-2).int()
    basis = torch.where(basis > 7, basis - 16, basis) * vs.float()[..., None]
    keys = (c8.float() * cs.float()[..., None]) @ basis + (mu8.float() * mus.float()[..., None])[:, :, None]
    grouped = q.float().view(n_req, st.n_kv, st.G, st.d)
    step = grouped.abs().amax(-1, keepdim=True) / 127
    grouped = (grouped / step).round() * step * scale
    st.score_h = [torch.einsum("hgd,phtd->hgpt", grouped[b], keys[table[b].long()]).logsumexp(-1) for b in range(n_req)]

def rki4_select_only(st, n_req):
    notice("select")
    for b in range(n_req):
        pages = int(st.n_pages[b])
        last = pages - st.window_pages
        mass = st.score_h[b][..., :last]
        mass = (mass - mass.amax(-1, keepdim=True)).exp().sum(1)
        best = mass[:, st.sink_pages:].topk(min(st.budget_pages, last - st.sink_pages)).indices + st.sink_pages
        for h in range(st.n_kv):
            ids = sorted({*range(st.sink_pages), *best[h].tolist(), *range(last, pages)})
            st.page_table[b, h, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
            st.page_cnt[b, h] = len(ids)
""",
    "selection/select_cuda.py": """
def _get():
    from torch.utils.cpp_extension import load_inline
    return load_inline(name="select", cpp_sources="", cuda_sources="")
""",
    "attention/decode.py": """
import torch

def ensure_stage_b_buffers(st, device, split):
    st.split = split

class ResidentVSource:
    def __init__(self, cache):
        self.values = cache[1]

def sparse_paged_decode_batched(q, cache, table, lengths, st, out, source, *, scale):
    assert cache.shape[0] == 2 and st.D == q.shape[-1]
    keys, values = cache[0], source.values
    for b in range(len(lengths)):
        for h in range(st.n_kv):
            logical = st.page_table[b, h, : st.page_cnt[b, h]].long()
            live = (logical[:, None] * st.page + torch.arange(st.page) < lengths[b]).flatten()
            k, v = (x[table[b].long()[logical], :, h].flatten(0, 1)[live].float() for x in (keys, values))
            heads = slice(h * st.G, (h + 1) * st.G)
            out[b, heads] = ((q[b, heads].float() @ k.T * scale).softmax(-1) @ v).to(out.dtype)
""",
}


def write(folder: Path) -> None:
    """Put the package `locks` into `folder`."""
    for name, source in FILES.items():
        file = folder / "locks" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
