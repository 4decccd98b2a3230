"""The author's package as a backend: how it is loaded and judged, with a stand-in for it; the real one on a GPU."""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_locks_kv
import pytest
import torch
from harness_fakes import tiny_case, tiny_workload
from torch.utils import cpp_extension

from harness.backend import UnsupportedWorkload
from harness.backends import locks_kv_package
from harness.backends.locks_kv import CacheView, LocksKv, LocksKvBest, LocksKvDefault
from harness.backends.locks_kv_package import summary_fields
from harness.case import Case
from harness.libraries import BY_BACKEND, LOCKS_KV
from harness.timer import Cycle
from harness.verify import Gate, Incorrect, check_eager
from locks_kernels import reference
from locks_kernels.cache import PagedCache
from locks_kernels.shapes import DecodeShape, SelectOptions
from locks_kernels.summary import RecordLayout, pack, unpack

FLAG_SETS = pytest.mark.parametrize("backend", [LocksKvDefault, LocksKvBest])


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """The stand-in installed, for this test alone; the names of the extensions that are built."""
    fake_locks_kv.write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(locks_kv_package, "_loaded", {})
    names: list[str] = []

    def load_inline(name: str, **sources: Any) -> ModuleType:
        names.append(name)
        return ModuleType(name)

    monkeypatch.setattr(cpp_extension, "load_inline", load_inline)
    monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path))
    yield names
    for module in [name for name in sys.modules if name.startswith("_locks_kv_")]:
        del sys.modules[module]


def gated(backend: LocksKv, case: Case | None = None, change: Callable[[LocksKv], None] | None = None) -> Gate:
    backend.tuned = False  # type: ignore[misc]  # needs a GPU's clock
    workload = tiny_workload(case)
    launches = [backend.prepare(workload, copy) for copy in range(workload.plan.launches)]
    if change:
        change(backend)
    gate = Gate(workload)
    check_eager(gate, workload, backend, launches, Cycle(workload.set_phase))
    assert list(backend.stages(workload, 0)) == ["score", "select", "attend"]
    return gate


@FLAG_SETS
@pytest.mark.parametrize("ctx", [48, 64, 65, 320, 325])
def test_passes_the_gate(built: list[str], backend: type[LocksKv], ctx: int) -> None:
    record = gated(backend(), tiny_case(ctx)).record()
    assert 0 < record["relative_error"] < 1e-2
    assert {"kept_pages", "tables_sound", "kept_mass_of_best", "summary_error"} <= set(record["checks"])
    assert record["checks"]["kept_pages"] == [min(4, -(-ctx // 16))]


def test_flag_sets_live_side_by_side(built: list[str]) -> None:
    default, best = LocksKvDefault(), LocksKvBest()
    gated(default)
    gated(best)
    assert built == ["score", "select", "score_best", "select"]
    packages = default._package, best._package
    assert [package.state.RECORDS for package in packages if package] == [False, True]
    for package, records in zip(packages, (None, "1"), strict=True):
        assert package and {value for _, value in package.score.seen} == {records}
    assert "RKI4_MMA_AOS" not in os.environ
    assert best.resolved()["flags"] == LocksKvBest.flags and default.resolved()["flags"] == {}


def test_the_environment_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RKI4_A", "old")
    with pytest.raises(ZeroDivisionError), locks_kv_package.environment({"RKI4_A": "new", "RKI4_B": "1"}):
        assert os.environ["RKI4_A"] == "new" and os.environ["RKI4_B"] == "1"
        raise ZeroDivisionError
    assert os.environ["RKI4_A"] == "old" and "RKI4_B" not in os.environ


def keeps_one_more(backend: LocksKv) -> None:
    backend._state.budget_pages += 1


def keeps_one_less(backend: LocksKv) -> None:
    backend._state.budget_pages -= 1


def keeps_the_worst(backend: LocksKv) -> None:
    state = backend._state
    for step in backend._steps:
        step_score = step["score"]

        def score(step_score: Callable[[], object] = step_score) -> None:
            step_score()
            state.score_h = [-scores for scores in state.score_h]

        step["score"] = score


def forgets_summaries(backend: LocksKv) -> None:
    backend._state.slabs[4].zero_()


@pytest.mark.parametrize(
    "change, check",
    [
        (keeps_one_more, "relative_error"),
        (keeps_one_less, "kept_pages"),
        (keeps_the_worst, "kept_mass"),
        (forgets_summaries, "summary_error"),
    ],
)
def test_wrong_results_are_seen(built: list[str], change: Callable[[LocksKv], None], check: str) -> None:
    class Changed(LocksKvDefault):
        def prepare(self, workload, copy):  # type: ignore[no-untyped-def]
            super().prepare(workload, copy)
            return lambda: [part() for part in self._steps[copy].values()][-1]

    with pytest.raises(Incorrect, match=check):
        gated(Changed(), change=change)


def test_attention_over_other_pages_is_seen(built: list[str]) -> None:
    def shifted(backend: LocksKv) -> None:
        package = backend._package
        assert package
        original = package.attend.sparse_paged_decode_batched

        def attend(query: torch.Tensor, cache: object, table: torch.Tensor, *args: object, **options: object) -> None:
            original(query, cache, table.roll(1, 1), *args, **options)

        package.attend.sparse_paged_decode_batched = attend  # type: ignore[attr-defined]

    with pytest.raises(Incorrect, match="relative_error"):
        gated(LocksKvDefault(), change=shifted)


def test_layouts_convert_both_ways() -> None:
    shape = DecodeShape(4, 2, 64)
    keys = torch.randn(6, 2, 16, 64, generator=torch.Generator().manual_seed(1))
    ours = reference.summarise(keys, 8)
    nibbles = ours.basis.flip(-2).view(torch.uint8) & 15
    slabs = (
        nibbles[..., 0::2] | (nibbles[..., 1::2] << 4),
        ours.basis_scale.flip(-1),
        ours.coefficients.flip(-1),
        ours.coefficient_scale,
        ours.centroid,
        ours.centroid_scale,
        torch.zeros(6, 2, 8),
    )
    pages = torch.tensor([4, 0, 5])
    records = pack(summary_fields(slabs, pages))
    assert torch.equal(records, pack(ours)[pages])
    assert torch.equal(unpack(records, RecordLayout.of(shape)).reconstruct(), ours.reconstruct()[pages])


def test_the_cache_is_viewed_not_copied() -> None:
    cache = PagedCache.allocate(DecodeShape(4, 2, 64), 5, "cpu")
    view = CacheView(cache)
    assert tuple(view.shape) == (2, 5, 16, 2, 64) and view[0].shape == view.shape[1:]
    cache.keys[3, 1, 7] = 1.0
    cache.values[3, 1, 7] = 2.0
    assert bool((view[0][3, 7, 1] == 1).all()) and bool((view[1][3, 7, 1] == 2).all())


def test_a_pool_beyond_its_offsets_is_skipped(built: list[str]) -> None:
    backend, workload = LocksKvDefault(), tiny_workload(tiny_case(320))
    backend.prepare(workload, 0)
    workload.caches[1] = PagedCache.allocate(DecodeShape(32, 8, 128), 160_000, "meta")
    workload.shape = workload.caches[1].shape
    with pytest.raises(UnsupportedWorkload, match="32 bits"):
        backend.prepare(workload, 1)


@pytest.mark.parametrize(
    "shape, default, best",
    [
        (DecodeShape(32, 8), None, None),
        (DecodeShape(32, 4), None, None),
        (DecodeShape(32, 2), "more than 8", "groups of 4 or 8"),
        (DecodeShape(14, 2, 64), None, "groups of 4 or 8"),
        (DecodeShape(32, 8, page_size=32), None, "pages of 16"),
        (DecodeShape(32, 8, page_size=64), "--page-size 16", "pages of 16"),
        (DecodeShape(32, 8, dtype="float16"), "--dtype bfloat16", "--dtype bfloat16"),
        (DecodeShape(32, 8, rank=4), "--rank 8", "--rank 8"),
    ],
)
def test_refusals_say_what_to_use(shape: DecodeShape, default: str | None, best: str | None) -> None:
    for backend, expected in ((LocksKvDefault(), default), (LocksKvBest(), best)):
        reason = backend.unsupported(shape)
        assert reason is None if expected is None else reason and expected in reason


@FLAG_SETS
def test_what_is_missing(monkeypatch: pytest.MonkeyPatch, backend: type[LocksKv]) -> None:
    def reason() -> str | None:
        return backend().unavailable()

    for name in [name for name in os.environ if name.startswith(("LOCKS_", "RKI4_"))]:
        monkeypatch.delenv(name)
    versions: list[str | None] = [None]
    monkeypatch.setattr("harness.libraries.version", lambda package: versions[0])
    assert "pip install locks-kv==0.1.4" in (reason() or "")
    versions[0] = "0.2.0"
    assert "locks-kv 0.2.0" in (reason() or "") and "pip install locks-kv==0.1.4" in (reason() or "")
    versions[0] = locks_kv_package.SUPPORTED
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    assert "nvcc" in (reason() or "")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", "/cuda")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "pip install ninja" in (reason() or "")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setenv("LOCKS_BENCH_COMMIT", "abc")
    assert reason() is None
    monkeypatch.setenv("LOCKS_RKI4_Z", "12")
    assert "LOCKS_RKI4_Z" in (reason() or "") and "LOCKS_BENCH" not in (reason() or "")


def test_a_bare_compiler_finds_what_came_with_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cuda = tmp_path / "nvidia" / "cu13"
    (cuda / "include").mkdir(parents=True)
    (cuda / "lib").mkdir()
    (cuda / "lib" / "libcudart.so.13").write_text("runtime")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path / "built"))
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", "/mine")
    monkeypatch.delenv("LIBRARY_PATH", raising=False)
    for _ in range(2):  # the second time, the link is there
        paths = locks_kv_package._toolchain()
        assert paths["CPLUS_INCLUDE_PATH"].split(os.pathsep) == ["/mine", str(cuda / "include")]
        assert (Path(paths["LIBRARY_PATH"]) / "libcudart.so").read_text() == "runtime"
    (cuda / "lib" / "libcudart.so.13").rename(cuda / "lib" / "libcudart.so.14")
    assert (Path(locks_kv_package._toolchain()["LIBRARY_PATH"]) / "libcudart.so").read_text() == "runtime"
    shutil.rmtree(cuda)
    assert locks_kv_package._toolchain() == {}


def test_runs_on_gpus_only() -> None:
    assert "--device cuda" in (LocksKvDefault().supports(tiny_case()) or "")


def test_names_and_the_pinned_version() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["locks_bench.backends"]
    for name in ("locks-kv[default]", "locks-kv[best]"):
        module, _, attribute = points[name].partition(":")
        assert getattr(import_module(module), attribute).name == name
        assert BY_BACKEND[name] is LOCKS_KV
    pinned = f"locks-kv=={locks_kv_package.SUPPORTED}"
    assert pinned in project["optional-dependencies"]["rivals"] and pinned in LOCKS_KV.install


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(900)  # it compiles for minutes at first
@FLAG_SETS
@pytest.mark.parametrize("ctx, batch, budget", [(1024, 1, 2048), (8192, 1, 2048), (8200, 3, 512)])
def test_the_real_package_passes_the_gate(backend: type[LocksKv], ctx: int, batch: int, budget: int) -> None:
    from test_harness_gpu import llama, measure

    from harness.record import Outcome

    case = Case(**(vars(llama(ctx, batch)) | {"select": SelectOptions(budget)}))
    record = measure(case, backend)[backend.name]
    if record.outcome is Outcome.SKIPPED:
        pytest.skip(record.reason or "")
    assert record.outcome is Outcome.OK, (record.reason, record.gate)
    assert set(record.stages_ns or {}) == {"score", "select", "attend"}
    assert record.resolved["score_split"] == "automatic" or backend is LocksKvBest
