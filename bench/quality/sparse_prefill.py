"""What sparse prefill costs hy3-tiny at 16K: recall and bits per byte against dense prefill, context by context.

    PYTHONPATH=. python bench/quality/sparse_prefill.py --data DATA --device cuda --out sparse_prefill.json

Each context of `katydid eval`'s recall task is computed once for each setting: its eight questions give recall, the
second half of its text (facts included, which nobody can predict) gives bits per byte. Intervals are bootstraps over
contexts; differences are paired. `--from` takes the lines of an earlier run, one JSON object a context and setting.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from katydid_cli.evaluation.figures import Item, estimate
from katydid_cli.evaluation.held_out import load_held_out
from katydid_cli.evaluation.recall import context_item
from katydid_cli.evaluation.text import ModelText
from katydid_engine.scoring import ModelScorer, TokenScores
from katydid_engine.sparse_prefill import SparsePrefill

LENGTH, TAIL = 16384, 400
_FIELDS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((f"{budget:.0%}", {"budget": budget}) for budget in (0.25, 0.4, 0.5, 0.6)),
    *((f"{budget:.0%}, 4 blocks of tail", {"budget": budget, "tail_blocks": 4}) for budget in (0.25, 0.4, 0.5, 0.6)),
    *((f"25%, {layers} dense layers", {"budget": 0.25, "dense_layers": layers}) for layers in (3, 4)),
    *((f"60%, {layers} dense layers", {"budget": 0.6, "dense_layers": layers}) for layers in (3, 4)),
    ("the paper's rule", {"rule": "paper"}),
    ("the paper's rule, 4 blocks of tail", {"rule": "paper", "tail_blocks": 4}),
    *(
        (
            f"{budget:.0%}, {layers} dense layers, 4 blocks of tail",
            {"budget": budget, "dense_layers": layers, "tail_blocks": 4},
        )
        for budget, layers in ((0.2, 2), (0.25, 1), (0.25, 0), (0.2, 0))
    ),
)
SETTINGS: dict[str, SparsePrefill | None] = {"dense": None} | {
    name: SparsePrefill(min_tokens=1, **({"tail_blocks": 0} | fields)) for name, fields in _FIELDS
}


class Keeping(ModelScorer):
    """A scorer that keeps what it last scored."""

    ids: Sequence[int] = ()
    scores = TokenScores([], [])

    def score(self, ids: Sequence[int]) -> TokenScores:
        self.ids, self.scores = ids, super().score(ids)
        return self.scores


def measure(model: Path, data: Path, contexts: Sequence[int], device: str) -> Iterator[dict[str, Any]]:
    text, code = ModelText(model), load_held_out(data, "code")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    scorers = {
        setting: Keeping(model, device=device, dtype=dtype, sparse_prefill=option)
        for setting, option in SETTINGS.items()
    }
    for index in contexts:
        for setting, scorer in scorers.items():
            item = context_item(scorer, text, code, LENGTH, f"recall/{LENGTH}/{index}")
            first, last = len(scorer.ids) // 2, len(scorer.ids) - TAIL
            nats = -sum(scorer.scores.logprobs[first:last])
            size = len(text.decode(scorer.ids[first + 1 : last + 1]).encode())
            bits = nats / math.log(2)
            yield {"i": index, "setting": setting, "right": item.gain, "asked": item.base, "bits": bits, "bytes": size}


def rows(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Figures of every budget, over the contexts that all budgets have."""
    settings = list(dict.fromkeys(line["setting"] for line in lines))
    of = {setting: {line["i"]: line for line in lines if line["setting"] == setting} for setting in settings}
    shared = sorted(set.intersection(*(set(found) for found in of.values())))
    figures = []
    for setting, found in of.items():
        chosen = [found[index] for index in shared]
        recall = [Item(line["right"], line["asked"]) for line in chosen]
        bits = [Item(line["bits"], line["bytes"]) for line in chosen]
        more = [Item(found[index]["bits"] - of["dense"][index]["bits"], found[index]["bytes"]) for index in shared]
        figures += [
            estimate(f"{setting}: recall at 16K", recall, "share", "higher"),
            estimate(f"{setting}: bits per byte at 8K to 16K", bits, "bit/byte", "lower"),
            estimate(f"{setting}: bits per byte more than dense", more, "bit/byte", "lower"),
        ]
    told = [asdict(figure) for figure in figures]
    none = {"floor": None, "peer": None, "peer_value": None, "bar": None, "met": None}
    return [{"figure": figure.pop("name"), **figure, **none} for figure in told]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=Path("models/hy3-tiny"))
    parser.add_argument("--data", type=Path, default=Path(".data"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--contexts", type=int, default=16)
    parser.add_argument("--first", type=int, default=0, help="of the contexts")
    parser.add_argument("--from", dest="lines", type=Path)
    parser.add_argument("--out", type=Path, default=Path("bench/results/sparse_prefill.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.lines is not None:
        lines = [json.loads(line) for line in arguments.lines.read_text().splitlines()]
    else:
        lines = []
        contexts = range(arguments.first, arguments.first + arguments.contexts)
        for line in measure(arguments.model, arguments.data, contexts, arguments.device):
            print(json.dumps(line), flush=True)
            lines.append(line)
    command = "PYTHONPATH=. python bench/quality/sparse_prefill.py"
    content = {"model": "hy3-tiny", "decay": 0.7, "command": command, "rows": rows(lines)}
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
