"""Which blocks of keys each block of a prompt's queries attends to in sparse prefill: few, and more for early queries.

After Stem ("Rethinking causal information flow in sparse attention", arXiv 2603.06274). Queries and keys are cut into
blocks of 128 tokens at absolute positions. Query block i keeps the k(i) blocks with the best of

    score(i, j) = sum_g Q_i[g] . K_j[s - 1 - g] / sqrt(d) / (128 / s)^2  +  beta * max(0, log max_t ||v_t||)

where ``Q_i[g]`` sums the block's queries at positions that are g modulo the stride s (so the products run along
anti-diagonals, as in XAttention): what a query asks for, and how much a block could add to its output. The first blocks
of the prompt, the last ones before the query's own and its own are always among the k(i). The budget decays along the
prompt, because what early tokens get wrong flows into all later ones (`budget`).

Everything is a function of the prompt's length, its keys and its own queries: chunks of a prompt that begin at
multiples of 128 select what the whole prompt does, and keys that a cache held count as if computed here.
"""

from katydid_kernels.stem_select.budget import StemRule, kept_blocks
from katydid_kernels.stem_select.op import stem_select
from katydid_kernels.stem_select.plan import SparsePlan, sparse_plan
from katydid_kernels.stem_select.reference import stem_select_reference

__all__ = ["SparsePlan", "StemRule", "kept_blocks", "sparse_plan", "stem_select", "stem_select_reference"]
