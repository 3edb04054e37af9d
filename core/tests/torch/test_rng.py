"""Random generators: captured, restored, compared."""
# ruff: noqa: NPY002 - the generator that scripts draw from

import random

import numpy as np
import torch

from instep.torch import rng


def draws() -> tuple[float, float, float, float, float]:
    return random.random(), random.gauss(0, 1), float(np.random.random()), float(np.random.normal()), torch.rand(1).item()


def test_restored_generators_draw_the_same() -> None:
    rng.seed_all(3)
    random.gauss(0, 1)
    np.random.normal()
    state = rng.capture()
    first = draws()
    assert rng.capture() != state
    rng.restore(state)
    assert rng.capture() == state
    assert draws() == first


def test_each_generator_shows_in_the_capture() -> None:
    rng.seed_all(3)
    for draw in (random.random, np.random.random, lambda: torch.rand(1), lambda: random.gauss(0, 1)):
        before = rng.capture()
        draw()
        assert rng.capture() != before


def test_a_capture_without_numpy_leaves_numpy_alone() -> None:
    rng.seed_all(3)
    state = rng.capture(but_numpy=True)
    expected = np.random.RandomState(3)
    expected.random_sample()
    np.random.random()
    rng.restore(state)
    assert np.random.random() == expected.random_sample()


def test_seeds_beyond_32_bits() -> None:
    rng.seed_all(2**40 + 5)
    first = draws()
    rng.seed_all(2**40 + 5)
    assert draws() == first
