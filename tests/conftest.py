"""Kernels run in Triton's interpreter without a GPU; the switch must be set before any test defines a kernel. Processes
of tests get what is set here too."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# What only requests with grammars need is not started with every engine.
os.environ.setdefault("KATYDID_ENGINE_WARM_GRAMMARS", "false")
