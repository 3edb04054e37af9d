"""The pytest plugin ``instep``: fixtures for a job, an incident, a gloo world and faults. It imports nothing heavy by itself."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from instep.model import IncidentReport
    from instep.testing.faults import Faults
    from instep.testing.jobs import Jobs
    from instep.testing.nursery import Nursery
    from instep.testing.world import World


@pytest.fixture
def faults() -> "Faults":
    """Faults to inject: ``faults.kill(rank=2).at(step=5, phase="backward")``."""
    from instep.testing.faults import Faults

    return Faults()


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Jobs]":
    """Runs scripts under a real agent: ``job.run(Script("train.py"), faults)``, and ``job.drill`` to compare bit for bit."""
    from instep.testing.jobs import Jobs

    jobs = Jobs(tmp_path_factory.mktemp("jobs"))
    yield jobs
    jobs.close()


@pytest.fixture
def incident() -> "Callable[..., IncidentReport]":
    """Makes a finished incident, for tests of ``report`` hooks; keywords replace its fields."""
    from instep.testing.samples import incident

    def make(**changes: object) -> "IncidentReport":
        made = incident()
        return type(made).model_validate({**{name: getattr(made, name) for name in type(made).model_fields}, **changes})

    return make


@pytest.fixture(scope="session")
def instep_nurseries() -> "Iterator[Callable[[Sequence[str]], Nursery]]":
    """Warm interpreters that fork the ranks of test worlds, one for each set of modules imported beforehand."""
    from instep.testing.nursery import Nursery

    made: dict[tuple[str, ...], Nursery] = {}

    def get(preload: Sequence[str]) -> "Nursery":
        key = tuple(preload)
        if key not in made:
            made[key] = Nursery(key)
        return made[key]

    yield get
    for nursery in made.values():
        nursery.close()


@pytest.fixture
def gloo_world(instep_nurseries: "Callable[[Sequence[str]], Nursery]", tmp_path: Path) -> "Iterator[Callable[..., World]]":
    """Makes worlds of real processes with a gloo group: ``gloo_world(3)``, then ``world.together([0, 1, 2], "module:function")``."""
    from instep.testing.nursery import TORCH
    from instep.testing.world import World

    with ExitStack() as stack:

        def make(size: int, *, plugin: str | None = None, settings: "Mapping[str, object] | None" = None) -> "World":
            world = stack.enter_context(World(instep_nurseries(TORCH), size, plugin=plugin, settings=settings))  # type: ignore[arg-type]
            answers = world.together(range(size), "instep.testing.gloo:connect", file=str(tmp_path / f"store-{id(world)}"))
            if bad := {rank: str(answer) for rank, answer in answers.items() if not answer.ok}:
                pytest.fail(f"the gloo world could not connect: {bad}")
            return world

        yield make
