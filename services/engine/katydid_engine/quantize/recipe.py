"""How to quantise by data, as a YAML file: what `katydid quantize --recipe` reads.

    calibration: {sources: [generated, "python:click", notes.txt], sequences: 128, tokens: 2048, seed: 0}
    smooth: [attention_input, value_output, feed_forward_input, down]
    fp8: [attention, draft]
    fp8_layers: [0, 29]
    fp8_scales: tensor
    clip: mse
    gptq: {damping: 0.01, act_order: true, refit_scales: true, follow_drift: true, starved_tokens: 256}
    kv_scales: tensor
    rotate_keys: true
    key_means: true
    balance_keys: true
    distill: {steps: 300, learning_rate: 0.001, rounding_rate: 0.01, sequences: 4}

Everything may be left out, and `{}` is all of the defaults; `gptq: false` rounds to nearest, `distill: false` (the
default) learns nothing. An empty file is refused: it may as well be one that was not written to its end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from katydid_runtime.errors import SettingsError
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from katydid_engine.quantize.parts import Fp8Scales, Part

__all__ = ["Calibration", "Distillation", "Gptq", "Recipe", "read_recipe"]

Seam = Literal["attention_input", "value_output", "feed_forward_input", "down"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Calibration(_Strict):
    """Rows to quantise by.

    Attributes:
        sources: "generated" (by the model itself), "python:PACKAGE" (the texts of an installed package), or a text file
            or folder; in equal parts.
        sequences, tokens: how many, and how long each.
        seed: of the choice among more text than is needed, and of what is generated.
    """

    sources: tuple[str, ...] = Field(default=("generated",), min_length=1, strict=False)
    sequences: int = Field(default=128, ge=1)
    tokens: int = Field(default=2048, ge=16)
    seed: int = Field(default=0, ge=0)


class Gptq(_Strict):
    """How a weight is rounded where the rows that it multiplies are known.

    Attributes:
        damping: added to a Hessian's diagonal, as a share of its mean.
        act_order: columns with the largest rows are rounded first.
        refit_scales: scales of int4 are solved for once more when the codes are chosen.
        follow_drift: round towards the original model's products on the quantised model's rows.
        starved_tokens: an expert that fewer calibration tokens reach is rounded by all tokens.
    """

    damping: float = Field(default=0.01, gt=0, le=1, allow_inf_nan=False)
    act_order: bool = True
    refit_scales: bool = True
    follow_drift: bool = True
    starved_tokens: int = Field(default=256, ge=0)


class Distillation(_Strict):
    """Learning scales and rounding against the original model's logits.

    Attributes:
        steps: of the optimiser.
        learning_rate: of the logarithm of a scale of int4.
        rounding_rate: of where a weight lies between two values of its format, in their distance; 0 keeps the values.
        sequences: a step sees so many of the sequences.
        calibration: rows to learn by, of which there should be many more than a Hessian needs; None for the recipe's.
        fused: on a GPU, chains of elementwise operations become kernels of their own; making them takes up to a minute,
            which few or short steps do not win back.
    """

    steps: int = Field(default=300, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0, le=1, allow_inf_nan=False)
    rounding_rate: float = Field(default=0.01, ge=0, le=1, allow_inf_nan=False)
    sequences: int = Field(default=4, ge=1)
    calibration: Calibration | None = None
    fused: bool = True


def _false_is_none(value: Any) -> Any:
    return None if value is False else value


class Recipe(_Strict):
    """A whole recipe.

    Attributes:
        smooth: seams at which scales are moved.
        fp8: parts of the model that w4a8 leaves in e4m3: attention, dense blocks, shared experts, draft layers.
        fp8_layers: numbers of layers that w4a8 leaves in e4m3 as a whole.
        fp8_scales: what a scale of e4m3 stands for: a matrix, a row, or 128 x 128 weights; with these a row of
            activations has a scale for every 128 columns.
        clip: of int4's scales: "mse", or "none" for the largest weight of a group.
        gptq: None rounds to nearest.
        kv_scales: calibrated scales of K and V: one a layer, or one a head.
        rotate_keys: q and k are rotated behind RoPE, so that e4m3 pages hold no outliers.
        key_means: of every head's keys the mean is left out of e4m3 pages, which the softmax does not see.
        balance_keys: columns of q are scaled against those of k so that a rounded key costs scores least, in weights
            alone; where keys are rotated.
        rotate_residual: the residual stream is rotated, in weights alone; not with draft layers.
        distill: None learns nothing.
    """

    calibration: Calibration = Calibration()
    smooth: tuple[Seam, ...] = Field(
        default=("attention_input", "value_output", "feed_forward_input", "down"), strict=False
    )
    fp8: tuple[Part, ...] = Field(default=(), strict=False)
    fp8_layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(), strict=False)
    fp8_scales: Fp8Scales = "tensor"
    clip: Literal["mse", "none"] = "mse"
    gptq: Annotated[Gptq | None, BeforeValidator(_false_is_none)] = Gptq()
    kv_scales: Literal["none", "tensor", "head"] = "none"
    rotate_keys: bool = False
    key_means: bool = False
    balance_keys: bool = False
    rotate_residual: bool = False
    distill: Annotated[Distillation | None, BeforeValidator(_false_is_none)] = None


_SECTIONS: dict[str, type[_Strict]] = {"calibration": Calibration, "gptq": Gptq, "distill": Distillation}


def read_recipe(path: Path) -> Recipe:
    """A recipe file.

    Raises:
        SettingsError: it cannot be read, is empty or not YAML, or a field is unknown or out of range; names the field.
    """
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingsError(f"--recipe {path} can't be read: {reason}", field="recipe", value=str(path)) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise SettingsError(f"{where}: not YAML: {error}", field="recipe", value=str(path), allowed="YAML") from None
    if fields is None:
        raise SettingsError(
            f"{path} is empty; a recipe of nothing but defaults is {{}}",
            field="recipe",
            value=str(path),
            allowed="a mapping",
        )
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        at = [str(part) for part in first["loc"]]
        name = ".".join(at) or "recipe"
        wrong, allowed = first["msg"], first["msg"]
        if first["type"] == "extra_forbidden":
            section = _SECTIONS[at[-2]] if len(at) > 1 else Recipe
            wrong, allowed = "there is no such field", ", ".join(section.model_fields)
        elif first["type"] == "model_type":
            wrong, allowed = "it holds no fields", "a mapping"
        raise SettingsError(
            f"{path}: {name}: {wrong}", field=name, value=str(first["input"]), allowed=allowed
        ) from None
