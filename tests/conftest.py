"""Without a GPU, Triton kernels run in its interpreter; that has to be said before anything imports triton."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from vllm_world import world as world  # a fixture of several files

FORMS = {True: "one launch", False: "stages"}
HAS_CLUSTERS = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@pytest.fixture(params=FORMS if HAS_CLUSTERS else (False,), ids=FORMS.get)
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both forms of a CUDA step: whether one launch may do all of it."""
    from locks_kernels.cuda.launch import Launch

    if not request.param:
        monkeypatch.setattr(Launch, "whole_step", False)
    return request.param
