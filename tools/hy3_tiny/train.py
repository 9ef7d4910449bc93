"""Trains hy3-tiny on one GPU: next-token loss plus the MTP layer's, load balancing by the selection bias alone.

    python -m tools.hy3_tiny.train DATA OUT --steps N --budget-s S [--resume FOLDER] [--seed 1]

The learning rate warms up, stays, then falls linearly to zero (WSD). Progress is the larger of step / steps and
elapsed / budget, so that the run always ends with a finished decay inside its time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.hy3_tiny import model as hy3
from tools.hy3_tiny.batches import PHASES, POLISH, TOKENS, Maker, stream_batches
from tools.hy3_tiny.export import load_checkpoint, save_checkpoint
from tools.hy3_tiny.muon import Muon

MTP_WEIGHT = 0.3
LOG_EVERY = 50  # steps
SAVE_EVERY = 2000


@dataclass(frozen=True)
class Recipe:
    """Everything a run may vary."""

    steps: int
    budget_s: float
    seed: int = 1
    tokens: int = TOKENS
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    embed_lr: float = 0.01
    router_lr: float = 0.001
    decay: float = 0.02
    warmup_steps: int = 100
    decay_from: float = 0.5
    peak: float = 1.0
    balance_rate: float = 0.004
    workers: int = 10

    def scale(self, step: int, progress: float) -> float:
        """Learning-rate factor of the WSD schedule."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        fall = min(1.0, (1.0 - progress) / (1.0 - self.decay_from))
        return self.peak * max(0.0, min(warm, fall))


def optimizers(net: hy3.Hy3Tiny, recipe: Recipe) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for the matrices inside the blocks, AdamW for embeddings, head, routers and norms."""
    shape, views, small, routers = net.shape, [], [], []
    width = shape.expert_intermediate
    for name, p in net.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if name in ("embed", "head"):
            continue
        if leaf == "router":
            routers.append(p)
        elif p.dim() < 2:
            small.append(p)
        elif leaf in ("gate", "up") and p.shape[0] == (shape.experts + 1) * width:
            views.append((p, (shape.experts + 1, width, shape.hidden)))
        elif leaf == "down" and p.shape[1] == (shape.experts + 1) * width:
            views.append((p, (shape.experts + 1, shape.hidden, width)))
        else:
            views.append((p, (1, *p.shape)))
    adam = torch.optim.AdamW(
        [
            {"params": small, "lr": recipe.adam_lr, "base": recipe.adam_lr},
            {"params": routers, "lr": recipe.router_lr, "base": recipe.router_lr},
            {"params": [net.embed], "lr": recipe.embed_lr, "base": recipe.embed_lr},
            {"params": [net.head], "lr": recipe.adam_lr, "base": recipe.adam_lr},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
        fused=net.embed.is_cuda,
    )
    return Muon(views, recipe.muon_lr, decay=recipe.decay), adam


@dataclass(frozen=True)
class StepLosses:
    """Weighted mean losses of one batch, the expert loads, and token losses where targets are plain text or answers."""

    main: Tensor
    mtp: Tensor
    loads: list[Tensor]
    plain: Tensor
    answers: Tensor
    agreement: Tensor  # share of MTP drafts that equal the trunk's next choice


def losses(net: hy3.Hy3Tiny, batch: tuple[Tensor, Tensor], length: int, dtype: torch.dtype, follow: bool) -> StepLosses:
    """Losses of ids and weights [rows, length + 2].

    The MTP layer learns the text at first. With `follow` it learns what the trunk would choose, which is what an
    engine accepts; then nothing of its loss reaches the trunk, the embedding or the head.
    """
    ids, weights = batch
    inputs = ids[:, :length].reshape(-1)
    labels, labels2 = ids[:, 1 : length + 1].reshape(-1), ids[:, 2:].reshape(-1)
    w, w2 = weights[:, 1 : length + 1].reshape(-1), weights[:, 2:].reshape(-1)
    hidden, loads = net.trunk(inputs, length, dtype)
    main, token_losses, choices = hy3.head_loss(hidden, net.head, labels, w)
    chosen = torch.cat((choices.view(-1, length)[:, 1:], ids[:, -1:]), dim=1).reshape(-1)
    if follow:
        # Detached parameters look like the ones they replace: nothing is compiled anew.
        embed, head = nn.Parameter(net.embed.detach()), nn.Parameter(net.head.detach())
        drafted, load = net.draft(hidden.detach().requires_grad_(), labels, length, embed)
        mtp, _, drafts = hy3.head_loss(drafted, head, chosen, w2)
    else:
        drafted, load = net.draft(hidden, labels, length, net.embed)
        mtp, _, drafts = hy3.head_loss(drafted, net.head, labels2, w2)
    plain, answer = w == 1, w > 1
    return StepLosses(
        main / w.sum(),
        mtp / w2.sum(),
        [*loads, load],
        (token_losses * plain).sum() / plain.sum().clamp(min=1),
        (token_losses * answer).sum() / answer.sum().clamp(min=1),
        ((drafts == chosen) & (w2 == 1)).sum() / (w2 == 1).sum().clamp(min=1),
    )


@torch.no_grad()
def balance(net: hy3.Hy3Tiny, loads: list[Tensor], rate: float) -> None:
    """Raises the selection bias of experts below the mean load, lowers the others' (DeepSeek-V3's rule)."""
    for block, load in zip(net.moe_blocks(), loads, strict=True):
        block.bias += rate * torch.sign(load.mean() - load)
        block.bias -= block.bias.mean()


def summarise(window: list[tuple[int, Tensor]], loads: list[Tensor]) -> dict[str, float]:
    """Means over a log window; answers of long contexts apart; the worst expert's load over the mean."""
    names = ("loss", "mtp", "plain", "answers", "agreement")
    row = dict(zip(names, torch.stack([v for _, v in window]).mean(0).tolist(), strict=True))
    long = [v[3] for length, v in window if length > 4096]
    if long:
        row["answers_long"] = float(torch.stack(long).mean())
    row["max_load"] = max(float(load.max() / load.mean()) for load in loads)
    return row


def train(data: Path, out: Path, recipe: Recipe, resume: Path | None, device: str, compiled: bool) -> dict[str, Any]:
    """One whole run; writes the checkpoint and log.jsonl to `out` and returns the summary."""
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    maker = Maker(data, recipe.seed, recipe.steps, recipe.tokens, PHASES if resume is None else POLISH)
    batches = stream_batches(maker, recipe.workers)
    net = hy3.Hy3Tiny(hy3.Shape())
    if resume is None:
        net.init_weights(torch.Generator().manual_seed(recipe.seed))
    else:
        load_checkpoint(net, resume)
    net.to(device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if compiled:
        hy3.compile_pieces()
    muon, adam = optimizers(net, recipe)
    seen, step, window, mark = 0, 0, [], time.monotonic()
    ready = started
    attention = sdpa_kernel([SDPBackend.CUDNN_ATTENTION]) if device == "cuda" else contextlib.nullcontext()
    with attention, (out / "log.jsonl").open("w") as log:
        for step, batch in enumerate(batches):
            if step == 1:  # everything is compiled
                ready = time.monotonic()
            elapsed = (time.monotonic() - ready) / (recipe.budget_s - (ready - started)) if step else 0.0
            progress = max(step / recipe.steps, elapsed)
            if progress >= 1:
                break
            scale = recipe.scale(step, progress)
            ids = torch.from_numpy(batch.ids.astype("int64")).to(device, non_blocking=True)
            weights = torch.from_numpy(batch.weights.astype("float32")).to(device, non_blocking=True)
            made = losses(net, (ids, weights), batch.length, dtype, progress > recipe.decay_from)
            (made.main + MTP_WEIGHT * made.mtp).backward()  # type: ignore[no-untyped-call]
            muon.step(scale)
            for group in adam.param_groups:
                group["lr"] = group["base"] * scale
            adam.step()
            for p in net.parameters():
                p.grad = None
            balance(net, made.loads, recipe.balance_rate * scale)
            seen += recipe.tokens
            figures = torch.stack((made.main.detach(), made.mtp.detach(), made.plain, made.answers, made.agreement))
            window.append((batch.length, figures))
            if (step + 1) % LOG_EVERY == 0:
                row = {"step": step + 1, "tokens": seen, "scale": scale, **summarise(window, made.loads)}
                now = time.monotonic()
                row |= {"s": round(now - started, 2), "tokens_per_s": round(LOG_EVERY * recipe.tokens / (now - mark))}
                log.write(json.dumps(row) + "\n")
                log.flush()
                print(
                    " ".join(f"{k}={v:.4f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True
                )
                window, mark = [], now
            if (step + 1) % SAVE_EVERY == 0:
                save_checkpoint(net, out)
    save_checkpoint(net, out)
    summary = {
        "steps": seen // recipe.tokens,
        "tokens": seen,
        "seconds": round(time.monotonic() - started, 1),
        "recipe": vars(recipe),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else 0.0,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--resume", type=Path, help="a checkpoint folder; optimizer state starts anew")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    for name, default in (("steps", None), ("budget-s", None)):
        parser.add_argument(f"--{name}", type=float, required=default is None)
    for field, value in vars(Recipe(1, 1.0)).items():
        if field not in ("steps", "budget_s"):
            parser.add_argument(f"--{field.replace('_', '-')}", type=type(value), default=value)
    args = vars(parser.parse_args())
    recipe = Recipe(**{f: args[f] for f in vars(Recipe(1, 1.0)) if f != "steps"}, steps=int(args["steps"]))
    print(json.dumps(train(args["data"], args["out"], recipe, args["resume"], args["device"], not args["no_compile"])))


if __name__ == "__main__":
    main()
