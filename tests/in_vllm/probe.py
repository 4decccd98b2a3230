"""What each layer's last decode step at each batch size was made of, recorded on the way and judged by the reference.

Texts of a model with random weights part at the first page that rounding exchanges; this does not depend on them.  The record
is a copy on the device behind each layer's attention: captured in a graph it is made anew by every replay.
"""

from __future__ import annotations

from typing import Any

import torch

from locks_kernels import reference
from locks_kernels.cache import Sequences

SCORE_SHARE = 0.95  # of the threshold: what the lowest kept page may score (0.05 nats, a rounding of its summary)


class Probe:
    """install() before the engine is made; judge(layers by name) when it stands still, all pages where they were."""

    def __init__(self) -> None:
        self.steps: dict[tuple[str, int], dict[str, torch.Tensor]] = {}  # by layer and rows, padded ones included
        self.lent: Any = None  # the stages that the layer at hand was served with

    def install(self) -> None:
        from locks_kernels.vllm_plugin import gpu, layers

        plain, lend = gpu.LocksImpl.forward, layers.Served.stages

        def remembered(served: Any, *batch: Any) -> Any:
            self.lent = lend(served, *batch)
            return self.lent

        def forward(
            impl: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any, **more: Any
        ) -> Any:
            result = plain(impl, layer, query, key, value, kv_cache, attn_metadata, output, **more)
            if self.lent is not None:
                self.record(layer.layer_name, self.lent, query[: attn_metadata.decodes], output[: attn_metadata.decodes])
            self.lent = None
            return result

        gpu.LocksImpl.forward, layers.Served.stages = forward, remembered  # type: ignore[method-assign]

    def record(self, name: str, stages: Any, query: torch.Tensor, output: torch.Tensor) -> None:
        sequences = stages.sequences
        found = {"query": query, "output": output, "tables": stages.tables}
        found |= {"block_table": sequences.block_table, "seq_lens": sequences.seq_lens}
        kept = self.steps.setdefault((name, len(query)), {})
        for field, tensor in found.items():
            if field not in kept:
                kept[field] = tensor.new_zeros(tensor.shape)
            kept[field].copy_(tensor)

    def judge(self, modules: dict[str, Any]) -> dict[str, Any]:
        """layers, rows: how many were looked at; selected: rows that had to choose; lowest: worst score of a kept page, as a
        share of the reference's threshold; error: largest distance to exact attention over the kept pages, relative.

        A block that a request gave back is the first that vLLM takes for another, unless its prefix cache keeps it: so that
        must be on, and a request end with a full block."""
        from locks_kernels.vllm_plugin.pages import page_cache

        told = {"layers": len({name for name, _ in self.steps}), "rows": 0, "selected": 0, "lowest": 1.0, "error": 0.0}
        for (name, _), kept in self.steps.items():
            module = modules[name]
            served = module.impl.served
            cache, options = page_cache(module.kv_cache, served.shape), served.workspaces.options
            live = kept["seq_lens"] > served.shape.page_size  # the engine tries its graphs on sequences of one token
            if not live.any():
                continue
            query, output, tables = (kept[field][live] for field in ("query", "output", "tables"))
            sequences = Sequences(kept["block_table"][live], kept["seq_lens"][live])
            expected = reference.attend(query, cache, sequences, tables)[0].float()
            apart = (output.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)
            told["error"] = max(told["error"], float(apart.nan_to_num(9.0).max()))
            scores = reference.score(query, cache, sequences, options.recent_pages)
            combined = reference.combine(scores, served.shape.kv_heads, options.combine)
            best = reference.select(combined, sequences, served.shape, options)
            for row, tokens in enumerate(sequences.seq_lens.tolist()):
                told["rows"] += 1
                pages, kept_pages = served.shape.pages(tokens), options.kept_pages(served.shape.page_size)
                if pages <= options.table_pages(served.shape.page_size):
                    assert torch.equal(tables[row], best[row]), "a sequence within the budget keeps every page"
                    continue
                told["selected"] += 1
                ranked = slice(options.sink_pages, kept_pages - options.recent_pages)
                mine, theirs = (combined[row].gather(1, table[row, :, ranked].long()) for table in (tables, best))
                if (lowest := float((mine.amin(-1) / theirs.amin(-1)).min())) < told["lowest"]:
                    told |= {"lowest": lowest, "lowest at": f"{name}, row {row} of {len(query)}, {tokens} tokens"}
                for table in tables[row, :, :kept_pages].tolist():
                    assert table == sorted(set(table)) and table[0] >= 0 and table[-1] == pages - 1, "a table in order"
        return told
