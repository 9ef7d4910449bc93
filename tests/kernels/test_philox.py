"""Random numbers by Philox: published answers, and a scalar form of the noise made of them."""

from __future__ import annotations

import math

import pytest
import torch
from katydid_kernels.philox import gumbel_noise, philox4x32
from torch import Tensor

ALL_ONES = 0xFFFFFFFF


def words(*values: int) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """The vectors Random123 publishes for philox4x32-10 (kat_vectors)."""
    found = philox4x32(words(*counter), words(*key))  # type: ignore[arg-type]
    assert tuple(int(word) for word in found) == expected


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    """The paper's rounds in plain integers."""
    for _ in range(10):
        product0, product1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (product1 >> 32) ^ counter[1] ^ key[0],
            product1 & ALL_ONES,
            (product0 >> 32) ^ counter[3] ^ key[1],
            product0 & ALL_ONES,
        ]
        key = [(key[0] + 0x9E3779B9) & ALL_ONES, (key[1] + 0xBB67AE85) & ALL_ONES]
    return counter


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 7, 2**31 - 1])
def test_noise_is_the_documented_function(seed: int, position: int) -> None:
    signed = seed - 2**64 if seed >= 2**63 else seed
    noise = gumbel_noise(torch.tensor([signed]), torch.tensor([position], dtype=torch.int32), 11)[0]
    for token in range(11):
        word = scalar_philox([token // 4, position, 0, 0], [seed & ALL_ONES, seed >> 32])[token % 4]
        exact = -math.log(-math.log1p(-(word + 0.5) / 2**32))
        assert abs(float(noise[token]) - exact) < 1e-5 * max(1.0, abs(exact))


def test_a_row_does_not_depend_on_its_batch() -> None:
    seeds, positions = torch.arange(9) * 12345, torch.arange(9, dtype=torch.int32) + 100
    whole = gumbel_noise(seeds, positions, 321)
    for row in range(9):
        assert torch.equal(gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 321)[0], whole[row])


def test_distribution() -> None:
    """Gumbel moments: mean 0.5772, variance pi^2 / 6; and no infinities."""
    noise = gumbel_noise(torch.arange(64), torch.arange(64), 10_000).double()
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.57722) < 0.006  # 4 standard errors of 640,000 draws
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02
