"""Without a GPU, Triton kernels run in its interpreter; that has to be said before anything imports triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from vllm_world import world as world  # a fixture of several files
