"""Writes a quantised copy of a model folder: what ``katydid quantize`` runs.

One matrix (by a recipe: one layer) is in memory at a time, whatever the model's size. The result is safetensors under
compressed-tensors' names, with ``quantization_config`` in its config.json, so that other engines read it too.
"""

from katydid_engine.quantize.folder import SCHEMES, Options, Progress, Summary, quantize_folder
from katydid_engine.quantize.recipe import Recipe, read_recipe

__all__ = ["SCHEMES", "Options", "Progress", "Recipe", "Summary", "quantize_folder", "read_recipe"]
