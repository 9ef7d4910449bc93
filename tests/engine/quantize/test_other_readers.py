"""What is written is read by transformers and compressed-tensors as the weights that this engine multiplies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from katydid_engine.checkpoint import Checkpoint
from katydid_engine.loader import load_model
from katydid_engine.matrices import Fp8Matrix, Int4Matrix, read_matrix
from katydid_engine.model_config import read_model_config
from katydid_engine.quantize import Options, Recipe, quantize_folder
from katydid_engine.weights import Weights
from torch import Tensor

from tests.engine.models.families import forward
from tests.tiny_model import write_tiny_model

pytest.importorskip("compressed_tensors")
transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}  # whole groups and blocks of 128
BY_DATA: dict[str, Any] = {"calibration": {"sources": (), "sequences": 2, "tokens": 64}, "smooth": ("down",)}
CASES: dict[str, tuple[str, dict[str, Any] | None]] = {
    "w8a8": ("w8a8", None),
    "w4a8": ("w4a8", None),
    "w8a8c8 by data": ("w8a8c8", {"kv_scales": "head"}),
    "w8a8c8, means left out of pages": ("w8a8c8", {"kv_scales": "head", "key_means": True, "distill": {"steps": 2}}),
    "w4a8 by data, some parts in e4m3": ("w4a8", {"fp8": ("attention",), "fp8_layers": (1,), "distill": {"steps": 2}}),
    "w8a8, scales of rows": ("w8a8", {"fp8_scales": "channel", "smooth": ()}),
    "w8a8, scales of blocks": ("w8a8", {"fp8_scales": "block", "distill": {"steps": 2}}),
    "w4a8, residual stream rotated": ("w4a8", {"rotate_residual": True, "gptq": None, "smooth": ()}),
}


@pytest.mark.filterwarnings("ignore")  # of the packages that are asked
@pytest.mark.parametrize("case", CASES)
def test_the_same_weights(case: str, tmp_path: Path) -> None:
    scheme, fields = CASES[case]
    source = write_tiny_model(tmp_path / "model", "llama", **SHAPE)
    text = tmp_path / "calibration.txt"
    text.write_text("Every word of this is read twice. " * 20)
    recipe = None
    if fields is not None:
        sized = BY_DATA | {"calibration": BY_DATA["calibration"] | {"sources": (str(text),)}}
        recipe = Recipe.model_validate(sized | fields)
    out = tmp_path / "out"
    quantize_folder(source, out, Options(scheme, recipe=recipe))

    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ids = list(range(3, 60))
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits[0]  # the first call decompresses what is left
    weights = Weights(Checkpoint(out), CPU, torch.float32, quantization=read_model_config(out).quantization)
    found = 0
    for name, module in theirs.named_modules():
        if name.endswith("_proj"):
            assert torch.equal(module.weight.data, dequantised(weights.scope(name), tuple(module.weight.shape))), name
            found += 1
    assert found == 14
    model = load_model(out, dtype=torch.float32)
    ours = model.logits(forward(model, model.new_kv_cache(4), ids, [0, 1, 2, 3]))
    assert (ours - logits).norm() < 0.1 * logits.norm()  # rows are rounded by one, or by both


def dequantised(weights: Weights, shape: tuple[int, int]) -> Tensor:
    """fp32, as this engine has it."""
    matrix = read_matrix(weights, shape, (slice(0, shape[0]), slice(0, shape[1])), row_scales=True)
    assert isinstance(matrix, Fp8Matrix | Int4Matrix)
    return matrix.dequantised()
