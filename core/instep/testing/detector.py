"""The laws of a detector: silent while all is well, exact when it is not, and silent again once the step was repeated."""

import threading
import time
from collections.abc import Callable, Collection
from typing import ClassVar

import pytest

from instep.hooks import Interruption, Job, Plugin
from instep.model import Fault
from instep.plugins import LoadedPlugins
from instep.testing import samples
from instep.testing.contract import PluginContract, broken
from instep.testing.peer import SECRET
from instep.testing.walk import DEADLINES

Undo = Callable[[], None]


class DetectorContract(PluginContract):
    """Laws of ``detect``. Override ``provoke``, so that there is something to be found."""

    covers: ClassVar[Collection[str]] = ("detect",)

    def provoke(self, plugin: Plugin) -> Undo | None:
        """Make the next ``detect`` of this instance find a fault; the result makes the cause go away, if it does not by itself."""
        pytest.skip(f"override provoke() in the contract of {type(plugin).__name__}, so that there is a fault to detect")

    def test_a_healthy_rank_is_not_accused(self) -> None:
        """No fault without a cause."""
        self._need("detect")
        for line in self._lines():
            if line.hook == "detect" and line.none is False:
                broken(f"detect of {self._who} found a fault on rank {line.rank}, though nothing had happened")

    def test_a_provoked_fault_is_found_and_says_what_it_is(self) -> None:
        """A ``Fault`` that a person can act upon and the circuit breaker can recognise."""
        self._need("detect")
        self._skip_blocked()
        with _Started(self) as (_, ask, provoke):
            provoke()
            fault = self._fault(ask())
            if wrong := self._wrong(fault):
                broken(f"the fault that {self._who} detected: {wrong}: {fault!r}")

    def test_a_fault_that_comes_back_looks_the_same(self) -> None:
        """Equal signatures stop a job that fails for ever; without one it would go on and on."""
        self._need("detect")
        self._skip_blocked()
        with _Started(self) as (plugin, ask, provoke):
            seen = []
            for incarnation in (1, 2):
                undo = provoke()
                seen.append(self._fault(ask()))
                self._recover(plugin, undo, incarnation)
            if not seen[0].signature or seen[0].signature != seen[1].signature:
                broken(
                    f"one fault of {self._who}, provoked twice, has the signatures {seen[0].signature!r} and {seen[1].signature!r}: they "
                    "must be equal and not empty, so that the circuit breaker stops a job in which it always comes back"
                )

    def test_a_repeated_step_is_judged_afresh(self) -> None:
        """After the recovery, without its cause, there is no fault any more."""
        self._need("detect")
        self._skip_blocked()
        with _Started(self) as (plugin, ask, provoke):
            undo = provoke()
            self._fault(ask())
            self._recover(plugin, undo, 1)
            if (again := ask()) is not None:
                broken(f"detect of {self._who} still finds a fault after its cause went away and the step was repeated: {again!r}")

    def _fault(self, answer: object) -> Fault:
        if not isinstance(answer, Fault):
            broken(
                f"detect of {self._who} returned {answer!r} of type {type(answer).__name__} for the provoked fault; it must return a Fault"
            )
        return answer

    def _wrong(self, fault: Fault) -> str | None:
        if not fault.detail.strip():
            return "its detail is empty; say what was seen, and where"
        if fault.detected_by != self._name:
            return f"it says that it was detected by {fault.detected_by!r}; that must be the plugin's name, {self._name!r}"
        if not 0 < fault.at <= time.monotonic():
            return f"its time {fault.at!r} is not one of time.monotonic() that has passed"
        if any(not 0 <= rank < self.ranks for rank in fault.ranks):
            return f"its ranks {fault.ranks!r} are not all in a world of {self.ranks}"
        return None

    def _recover(self, plugin: LoadedPlugins, undo: Undo | None, incarnation: int) -> None:
        """What the plugin sees of a recovery; the step is repeated."""
        if undo is not None:
            undo()
        for acknowledging in (False, True):
            for _name, run in plugin.each("quiesce", interruption=Interruption(incarnation, samples.fault(), acknowledging)):
                run()


class _Started:
    """An instance in this process, since ``provoke`` belongs to the test; started, and closed in the end."""

    def __init__(self, contract: DetectorContract) -> None:
        self._contract = contract

    def __enter__(self) -> "tuple[LoadedPlugins, Callable[[], object], Callable[[], Undo | None]]":
        contract = self._contract
        plugin = contract.plugin.model_validate(dict(contract.settings))
        self._plugins = LoadedPlugins({contract._name: plugin})
        job = Job(rank=0, world_size=contract.ranks, local_rank=0, birth=0, host=samples.HOST, secret=SECRET)
        for _name, run in self._plugins.each("start", job=job):
            run()
        return self._plugins, self._ask, lambda: contract.provoke(plugin)

    def __exit__(self, *_: object) -> None:
        for _name, run in self._plugins.each("close"):
            run()

    def _ask(self) -> object:
        """What ``detect`` answers, within its deadline."""
        out: list[object] = []
        run = next(iter(self._plugins.each("detect")))[1]
        thread = threading.Thread(target=lambda: out.append(run()), daemon=True)
        thread.start()
        limit = {**DEADLINES, **self._contract.deadlines}["detect"]
        thread.join(limit)
        if thread.is_alive():
            broken(f"hook 'detect' of {self._contract._who} is past its deadline of {limit:g} s when there is a fault")
        return out[0] if out else broken(f"hook 'detect' of {self._contract._who} raised when there was a fault")
