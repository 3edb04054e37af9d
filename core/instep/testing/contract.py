"""The laws that every plugin keeps: subclass ``PluginContract`` in a test module, and give it the class.

Nothing is simulated: hooks run in processes of their own, which are killed when a hook blocks. Each failure is one message that says which
law is broken, where, and what to do.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import pytest

from instep import plugins
from instep.errors import PluginError
from instep.hooks import Plugin
from instep.model import Json
from instep.testing import census, surface
from instep.testing.nursery import TORCH, Nursery
from instep.testing.walk import ACTS, DEADLINES, NEEDS_TORCH, Line, Walk
from instep.testing.world import World

CYCLES = 4
FIRST_ANSWER = ("reinit_comms", "restore_state", "resume_data")
"""Hooks of every rank whose ``None`` means "not mine"."""
MORE: Mapping[str, str] = {
    "detect": "DetectorContract",
    "reinit_comms": "CommsContract",
    "restore_state": "StateContract",
    "resume_data": "DataContract",
}


def broken(message: str) -> NoReturn:
    """Fail with one message and nothing else."""
    pytest.fail(message, pytrace=False)


class PluginContract:
    """Laws of every plugin.

    Attributes:
        plugin: the class under test; an installed distribution must offer it.
        settings: settings for it, as in its table of the configuration.
        ranks: number of processes where ranks must agree.
        deadlines: seconds by hook, where a plugin promises to be quicker than ``instep.testing.walk.DEADLINES``.
        torch: whether its processes should have imported torch beforehand; hooks that need tensors imply it.
    """

    plugin: ClassVar[type[Plugin]]
    settings: ClassVar[Mapping[str, Json]] = {}
    ranks: ClassVar[int] = 3
    deadlines: ClassVar[Mapping[str, float]] = {}
    torch: ClassVar[bool] = False
    covers: ClassVar[Collection[str]] = ()
    _whole: ClassVar[dict[type, list[Line]]] = {}

    @pytest.fixture(autouse=True)
    def _warm(self, instep_nurseries: Callable[[Sequence[str]], Nursery]) -> None:
        self._nurseries = instep_nurseries

    # ---- laws

    def test_loads_by_metadata(self) -> None:
        """An installed distribution offers it, under one name, and it can be enabled."""
        if (wrong := surface.wrong_metadata(self.plugin)) is not None:
            broken(wrong)

    def test_hooks_are_spelt_and_typed_right(self) -> None:
        """Names, arguments, annotations, and the version of the hooks."""
        if wrong := list(surface.wrong_hooks(self.plugin)):
            broken("\n".join(wrong))

    def test_settings_are_strict(self) -> None:
        """Unknown keys are errors, values are frozen and survive the way to the ranks."""
        if wrong := list(surface.wrong_settings(self.plugin, self.settings)):
            broken("\n".join(wrong))

    def test_loading_imports_no_torch(self) -> None:
        """The agent loads plugins, and has no torch."""
        try:
            where = surface.torch_imported(self.plugin)
        except PluginError as error:
            broken(str(error))
        if where is not None:
            broken(f"importing {self.plugin.__name__} imports torch, at {where}: the agent loads plugins too. Import it inside the hooks")

    def test_hooks_keep_their_deadlines(self) -> None:
        """Every hook returns in time."""
        for line in self._lines():
            if line.answer.blocked:
                broken(self._late(line))

    def test_hooks_answer_what_they_may(self) -> None:
        """No hook raises in a plain recovery, and every answer is of its kind."""
        for line in self._lines():
            if line.answer.error or line.answer.died:
                broken(f"hook '{line.hook}' of {self._who} on rank {line.rank} {line.answer}")
            if (wrong := line.said.get("wrong")) is not None:
                broken(f"hook '{line.hook}' of {self._who} on rank {line.rank} {wrong}")

    def test_none_does_not_depend_on_rank(self) -> None:
        """``None`` means "not mine", and all ranks must think so, or each would ask another plugin."""
        self._need_one(FIRST_ANSWER)
        for hook in FIRST_ANSWER:
            lines = [line for line in self._lines() if line.hook == hook]
            for start in range(0, len(lines), self.ranks):
                turn = lines[start : start + self.ranks]
                silent, speaking = [x.rank for x in turn if x.none], [x.rank for x in turn if x.none is False or x.answer.blocked]
                if silent and speaking:
                    broken(
                        f"hook '{hook}' of {self._who} returned None on the ranks {silent} and took the call on {speaking}, in one and the "
                        "same recovery: None depends on the rank. Decide from the plan or the backend alone, which are equal on all ranks"
                    )

    def test_quiesce_can_be_repeated(self) -> None:
        """It is called again until the main thread has acknowledged."""
        self._need("quiesce")
        with self._walk(1) as walk:
            walk.start()
            for call in range(1, 6):
                for line in walk.call("quiesce", incarnation=1, thread=call != 4, acknowledging=call == 4):
                    if line.answer.blocked:
                        broken(self._late(line))
                    if not line.answer.ok:
                        when = f"cannot be repeated: call {call} for one fault" if call > 1 else "fails: it"
                        broken(
                            f"quiesce of {self._who} {when} {line.answer}. Quiesce is called again until the main thread has "
                            "acknowledged, so it must be idempotent"
                        )
            for line in walk.call("close"):
                if not line.answer.ok:
                    broken(f"close of {self._who} after quiesce {line.answer}")

    def test_nothing_is_left_behind(self) -> None:
        """Threads, open files, processes and files in shared memory are what they were before, however often it starts and closes."""
        self._skip_blocked()
        with self._world(1) as world:
            answer = world.do(0, f"{ACTS}:cycles", count=CYCLES)
        if not answer.ok or not isinstance(answer.value, dict):
            broken(f"start and close of {self._who}, {CYCLES} times over: it {answer}")
        if wrong := list(self._leaks(answer.value)):
            broken(f"{self._who} leaves things behind:\n" + "\n".join(wrong))

    def test_any_legal_order_of_calls(self) -> None:
        """Whatever order faults bring about, no call fails."""
        self._skip_blocked()
        from instep.testing.order import check

        with self._walk(1) as walk:
            check(walk, who=self._who)

    def test_each_capability_is_under_its_contract(self) -> None:
        """What it implements has laws of its own; those that this class does not bring are named."""
        lacking = {hook: contract for hook, contract in MORE.items() if self._has(hook) and hook not in self.covers}
        if lacking:
            pytest.skip("also subclass " + ", ".join(f"{contract} (for {hook})" for hook, contract in lacking.items()))

    # ---- for the laws

    @property
    def _who(self) -> str:
        return self.plugin.__name__

    @property
    def _name(self) -> str:
        return surface.entry_name(self.plugin) or self.plugin.__name__.lower()

    def _has(self, hook: str) -> bool:
        return hook in plugins.implemented(self.plugin)

    def _need(self, *hooks: str) -> None:
        if lacking := [hook for hook in hooks if not self._has(hook)]:
            pytest.skip(f"{self._who} implements no {', '.join(lacking)}")

    def _need_one(self, hooks: Sequence[str]) -> None:
        if not any(self._has(hook) for hook in hooks):
            pytest.skip(f"{self._who} implements none of {', '.join(hooks)}")

    def _late(self, line: Line) -> str:
        limit = {**DEADLINES, **self.deadlines}[line.hook]
        return f"hook '{line.hook}' of {self._who} is past its deadline of {limit:g} s: on rank {line.rank} it {line.answer}"

    @contextmanager
    def _world(self, size: int) -> Iterator[World]:
        torch = self.torch or NEEDS_TORCH & set(plugins.implemented(self.plugin))
        nursery = self._nurseries(TORCH if torch else ())
        with World(nursery, size, plugin=surface.target(self.plugin), name=self._name, settings=self.settings) as world:
            yield world

    @contextmanager
    def _walk(self, size: int | None = None) -> Iterator[Walk]:
        with self._world(self.ranks if size is None else size) as world:
            yield Walk(world, plugins.implemented(self.plugin), name=self._name, deadlines=self.deadlines)

    def _lines(self) -> list[Line]:
        """The calls of one whole lifecycle, made once for all laws that look at it."""
        if type(self) not in self._whole:
            with self._walk() as walk:
                walk.whole()
                self._whole[type(self)] = walk.script
        return self._whole[type(self)]

    def _skip_blocked(self) -> None:
        """One law tells of a hook that blocks; the others would only wait for it again."""
        if blocked := next((line.hook for line in self._lines() if line.answer.blocked), None):
            pytest.skip(f"{blocked} blocks, see test_hooks_keep_their_deadlines")

    def _leaks(self, told: Mapping[str, Any]) -> Iterator[str]:
        turns = CYCLES - 1
        for kind in ("thread", "process"):
            if left := census.more(told["before"], told["last"], kind):
                yield f"  a {kind} is left running after close: {', '.join(sorted(set(left)))}. End it in close, and join it"
        grown = census.more(told["first"], told["last"], "file")
        if len(grown) >= turns:
            what = ", ".join(sorted(set(grown)))
            yield f"  {len(grown)} open files (fd) more after {turns} turns of start and close: {what}. Close them in close"
        native = census.more(told["first"], told["last"], "native thread")
        if len(native) >= turns and not census.more(told["before"], told["last"], "thread"):
            yield f"  {len(native)} native threads more after {turns} turns of start and close: {', '.join(sorted(set(native)))}"
        if told["shm"]:
            yield f"  files in /dev/shm are left after close: {', '.join(told['shm'])}. Unlink them in close"
