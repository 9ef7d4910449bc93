"""Which experts get copies and on which GPU each copy lies, from how often each was chosen. Pure numpy.

The algorithm is that of DeepSeek's EPLB (github.com/deepseek-ai/EPLB, 2025), written anew:

    1. groups of experts are dealt to nodes, so that a token's experts stay on few nodes
    2. within a node the expert with the most load per copy gets one more copy, until all places are taken
    3. the copies are dealt to the node's GPUs

Dealing is greedy: the heaviest item goes to the lightest pack that has room, and all packs get equally many items.
Where groups do not divide over nodes, all nodes count as one.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["deal", "imbalance", "place_experts", "replicate"]

_Ints = NDArray[np.int64]
_Floats = NDArray[np.floating[Any]]


def deal(loads: _Floats, packs: int) -> _Ints:
    """The pack of each item, ``[items]``; every pack gets ``items / packs`` of them.

    Raises:
        ValueError: ``packs`` does not divide the items.
    """
    if len(loads) % packs:
        raise ValueError(f"{len(loads)} items do not divide over {packs} packs")
    # The lightest first, of equals the first; a layer's 224 copies are dealt between two passes.
    open_packs = [(0.0, pack, len(loads) // packs) for pack in range(packs)]
    pack_of = np.zeros(len(loads), dtype=np.int64)
    weights = loads.tolist()
    for item in np.argsort(-loads, kind="stable").tolist():
        filled, pack, room = open_packs[0]
        pack_of[item] = pack
        if room > 1:
            heapq.heapreplace(open_packs, (filled + weights[item], pack, room - 1))
        else:
            heapq.heappop(open_packs)
    return pack_of


def replicate(loads: _Floats, copies: int) -> _Ints:
    """The expert of each of ``copies`` copies: every expert once, in order, then those that were given another one."""
    shares = [(-load, expert, 1) for expert, load in enumerate(loads.tolist())]
    heapq.heapify(shares)
    extra = []
    for _ in range(copies - len(loads)):
        _, expert, count = shares[0]
        extra.append(expert)
        heapq.heapreplace(shares, (-float(loads[expert]) / (count + 1), expert, count + 1))
    return np.concatenate((np.arange(len(loads)), np.array(extra, dtype=np.int64)))


def place_experts(loads: _Floats, copies: int, gpus: int, *, nodes: int = 1, groups: int = 1) -> _Ints:
    """The expert of every place, ``[copies]``: GPU g has places ``g * copies / gpus`` and on.

    Args:
        loads: ``[experts]``, how much work each was, in any unit.
        copies: of all experts together; a multiple of ``gpus``, at least the number of experts.
        nodes: hosts, each of which gets whole groups; where these do not divide by them all GPUs are as of one host.
        groups: experts ``i * experts / groups`` and on are one group.

    Raises:
        ValueError: sizes that do not divide.
    """
    experts = len(loads)
    if copies < experts or copies % gpus or gpus % nodes or experts % groups:
        raise ValueError(f"cannot place {copies} copies of {experts} experts in {groups} groups on {nodes} x {gpus}")
    if groups % nodes or experts % nodes:
        nodes, groups = 1, 1
    members = np.arange(experts).reshape(groups, -1)
    node_of = deal(loads[members].sum(1), nodes)
    places: list[_Ints] = []
    for node in range(nodes):
        ours = members[node_of == node].ravel()
        expert_of = replicate(loads[ours], copies // nodes)
        count = np.bincount(expert_of, minlength=len(ours))
        gpu_of = deal((loads[ours] / count)[expert_of], gpus // nodes)
        places += [ours[expert_of[gpu_of == gpu]] for gpu in range(gpus // nodes)]
    return np.concatenate(places)


def imbalance(loads: _Floats, places: _Ints, gpus: int) -> float:
    """Load of the busiest GPU over the mean, when an expert's load is spread evenly over its copies; 1 is perfect."""
    count = np.bincount(places, minlength=len(loads))
    of_gpu = (loads / np.maximum(count, 1))[places].reshape(gpus, -1).sum(1)
    return float(of_gpu.max() / of_gpu.mean()) if of_gpu.any() else 1.0
