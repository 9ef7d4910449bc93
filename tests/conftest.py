"""Kernels run in Triton's interpreter without a GPU; the switch must be set before any test defines a kernel."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
