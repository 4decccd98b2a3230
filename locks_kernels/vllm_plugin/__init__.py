"""LOCKS as an attention backend of an unmodified vLLM (docs/vllm.md).

vLLM calls `register` in each of its processes.  Nothing here imports torch or vLLM before that, and the backend itself is
imported only by an engine that asks for it.
"""

from __future__ import annotations


def register() -> None:
    """Entry point `vllm.general_plugins`: give the backend its name.  Idempotent.

    SettingsError where LOCKS_VLLM is set and wrong.
    """
    from locks_kernels.vllm_plugin import compat, settings

    asked = settings.asked()
    compat.name_gpu_backend("locks_kernels.vllm_plugin.gpu.LocksBackend", asked)
    if asked:
        compat.replace_cpu_backend("locks_kernels.vllm_plugin.cpu.LocksCPUBackend")
