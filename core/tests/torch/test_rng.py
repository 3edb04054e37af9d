"""Random generators: captured, restored, compared."""
# ruff: noqa: NPY002 - the generator that scripts draw from

import random

import numpy as np
import pytest
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


def test_generators_are_read_right_whatever_was_drawn() -> None:
    """Also the second normal number of a pair, which is used up without a change in the generator's memory."""
    generators, draw = rng.Generators(), random.Random(1)
    start = random.getstate()
    numbers = (np.random.randn, np.random.rand, lambda: np.random.randn(3), lambda: np.random.seed(2), lambda: None)
    more = (random.random, lambda: random.gauss(0, 1), lambda: random.seed(3), lambda: random.setstate(start), lambda: torch.rand(2))
    for _ in range(2000):
        draw.choice(numbers + more)()
        assert rng.join(generators.parts()) == rng.capture()


def test_torch_s_second_normal_number_is_seen_to_go() -> None:
    """The engine does not move when it is drawn."""
    generators = rng.Generators()
    for _ in range(4):
        torch.randn(1)
        for _ in range(3):
            assert generators.parts()[1] == rng._torch()


def test_another_generator_of_numpy_is_noticed() -> None:
    generators, before = rng.Generators(), np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        for seed in (1, 2, 2):
            for _ in range(3):
                assert generators.parts()[3] == rng._numpy()
            np.random.set_bit_generator(np.random.MT19937(seed))  # type: ignore[attr-defined]
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]


@pytest.mark.parametrize("place", ["_engine", "_memory"])
def test_a_generator_that_is_not_found_in_memory_is_asked_each_time(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, place, lambda *_: None if place == "_engine" else memoryview(b""))
    generators = rng.Generators()
    for _ in range(5):
        draws()
        assert rng.join(generators.parts()) == rng.capture()


def test_generators_that_stand_still_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    rng.seed_all(3)
    generators = rng.Generators()
    for _ in range(2):
        parts = generators.parts()
    for ask in ("_python", "_torch", "_numpy"):
        monkeypatch.setattr(rng, ask, None)
    for _ in range(3):
        assert all(new is old for new, old in zip(generators.parts(), parts, strict=True))


def test_python_is_asked_only_when_its_memory_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    generators, asked, ask = rng.Generators(), [], rng._python

    def counted() -> bytes:
        asked.append(1)
        return ask()

    monkeypatch.setattr(rng, "_python", counted)
    for _ in range(5):
        generators.parts()
    assert len(asked) == 1
    random.random()
    generators.parts()
    assert len(asked) == 2


def test_seeds_beyond_32_bits() -> None:
    rng.seed_all(2**40 + 5)
    first = draws()
    rng.seed_all(2**40 + 5)
    assert draws() == first
