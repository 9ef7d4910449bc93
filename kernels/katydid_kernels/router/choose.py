"""What follows the logits on the device: scores, the best experts chosen and weighed.

The experts of a row lie in chunks of 64 columns. Before the first choice every column is sorted over the chunks, so a
round looks at the heads of 64 columns, however many experts there are, and the column that gave one moves up.
"""

# Inside a kernel tuples are joined by +, and grow.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,index,misc,var-annotated"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["choose_experts"]

# Below the key of every score, so it marks what was chosen already and what is no expert.
_TAKEN = gl.constexpr(-(2**31))


@gluon.jit
def _scores(logits, experts, SIGMOID: gl.constexpr):
    """Chunks of scores from chunks of logits ``[ROWS, 64]``."""
    CHUNKS: gl.constexpr = len(logits)
    scores = ()
    if SIGMOID:
        for c in gl.static_range(CHUNKS):
            scores = scores + (1.0 / (1.0 + gl.exp(-logits[c])),)
    else:
        layout: gl.constexpr = logits[0].type.layout
        column = gl.arange(0, logits[0].shape[1], gl.SliceLayout(0, layout))[None, :]
        largest = gl.full([logits[0].shape[0]], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
        for c in gl.static_range(CHUNKS):
            real = gl.where(column + c * logits[0].shape[1] < experts, logits[c], float("-inf"))
            largest = gl.maximum(largest, gl.max(real, 1))
        total = gl.zeros([logits[0].shape[0]], gl.float32, gl.SliceLayout(1, layout))
        for c in gl.static_range(CHUNKS):
            real = gl.where(column + c * logits[0].shape[1] < experts, logits[c], float("-inf"))
            power = gl.exp(real - largest[:, None])
            scores = scores + (power,)
            total += gl.sum(power, 1)
        powers = scores
        scores = ()
        for c in gl.static_range(CHUNKS):
            scores = scores + (powers[c] / total[:, None],)
    return scores


@gluon.jit
def _mapped(bits):
    """Between the bits of a float and the integer that orders alike; its own inverse.

    Comparing integers is exact, and a NaN cannot lead to an expert that does not exist.
    """
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@gluon.jit
def choose_experts(
    logits, row, end, experts, bias_ptr, scale, weights_ptr, ids_ptr,
    TOP_K: gl.constexpr, POWER_K: gl.constexpr, SIGMOID: gl.constexpr, RENORMALISE: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Store weights and ids of the top experts of rows `row` up to `end`; logits: chunks of ``[ROWS, 64]``. SHARED: and
    behind them expert number `experts` with weight 1; POWER_K holds it too. Returns the ids ``[ROWS, POWER_K]``, which
    choice and row each is, and which are real."""
    CHUNKS: gl.constexpr = len(logits)
    ROWS: gl.constexpr = logits[0].shape[0]
    COLUMNS: gl.constexpr = logits[0].shape[1]
    layout: gl.constexpr = logits[0].type.layout
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    scores = _scores(logits, experts, SIGMOID)
    keys = ()
    ids = ()
    for c in gl.static_range(CHUNKS):
        expert = column + c * COLUMNS
        preference = scores[c]
        if bias_ptr is not None:
            preference += gl.load(bias_ptr + expert, mask=expert < experts, other=0.0)
        # Adding zero makes one zero of the two.
        key = gl.maximum(_mapped((preference + 0.0).to(gl.int32, bitcast=True)), _TAKEN + 1)
        keys = keys + (gl.where(expert < experts, key, _TAKEN),)
        ids = ids + (gl.zeros([ROWS, COLUMNS], gl.int32, layout) + expert,)
    # Insertion sort of each column: stable, so equal keys stay in the order of experts.
    for i in gl.static_range(1, CHUNKS):
        for j in gl.static_range(i, 0, -1):
            later = keys[j] > keys[j - 1]
            high = gl.where(later, keys[j], keys[j - 1])
            low = gl.where(later, keys[j - 1], keys[j])
            high_id = gl.where(later, ids[j], ids[j - 1])
            low_id = gl.where(later, ids[j - 1], ids[j])
            keys = keys[: j - 1] + (high, low) + keys[j + 1 :]
            ids = ids[: j - 1] + (high_id, low_id) + ids[j + 1 :]

    choice = gl.arange(0, POWER_K, gl.SliceLayout(0, layout))[None, :]
    chosen_ids = gl.zeros([ROWS, POWER_K], gl.int32, layout)
    chosen_keys = gl.zeros([ROWS, POWER_K], gl.int32, layout)
    for j in gl.static_range(TOP_K):
        best = gl.max(keys[0], 1)[:, None]
        first = gl.min(gl.where(keys[0] == best, ids[0], CHUNKS * COLUMNS), 1)[:, None]
        taken = ids[0] == first
        moved_keys = ()
        moved_ids = ()
        for c in gl.static_range(1, CHUNKS):
            moved_keys = moved_keys + (gl.where(taken, keys[c], keys[c - 1]),)
            moved_ids = moved_ids + (gl.where(taken, ids[c], ids[c - 1]),)
        keys = moved_keys + (gl.where(taken, _TAKEN, keys[CHUNKS - 1]),)
        ids = moved_ids + (ids[CHUNKS - 1],)
        chosen_ids = gl.where(choice == j, first, chosen_ids)
        chosen_keys = gl.where(choice == j, best, chosen_keys)

    inside = (rows < end)[:, None] & (choice < TOP_K)
    weights = _mapped(chosen_keys).to(gl.float32, bitcast=True)
    if bias_ptr is not None:
        # Back to the score, to half a unit in the last place of the preference.
        weights -= gl.load(bias_ptr + chosen_ids, mask=inside, other=0.0)
    weights = gl.where(inside, weights, 0.0)
    if RENORMALISE:
        weights = weights / (gl.sum(weights, 1)[:, None] + 1e-20)
    weights *= scale
    if SHARED:
        inside = (rows < end)[:, None] & (choice <= TOP_K)
        weights = gl.where(choice == TOP_K, 1.0, weights)
        chosen_ids = gl.where(choice == TOP_K, experts, chosen_ids)
    place = rows[:, None] * (TOP_K + SHARED) + choice
    gl.store(weights_ptr + place, weights, mask=inside)
    gl.store(ids_ptr + place, chosen_ids, mask=inside)
    return chosen_ids, choice, rows, inside
