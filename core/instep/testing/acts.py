"""Commands that contracts give to the ranks of a test's world: each runs in a process of its own, with the plugin under test."""

import threading
from collections.abc import Callable, Mapping

from instep.errors import InstepError
from instep.hooks import Communicator
from instep.model import Json
from instep.testing import census, samples
from instep.testing.answers import wrong_answer
from instep.testing.peer import Rank

_CYCLE = ("start", "announce", "committed", "keep", "detect", "quiesce", "quiesce", "committed", "detect", "close")


def renew(me: Rank) -> None:
    """A new instance of the plugin, and nothing kept."""
    me.kept.clear()
    me.renew()


def call(me: Rank, hook: str, **given: Json) -> Json:
    """Call one hook: what it said, as JSON. ``thread``: in another thread, as the control thread does."""
    if given.pop("thread", False):
        return _in_thread(lambda: _call(me, hook, given))
    return _call(me, hook, given)


def hold(me: Rank, steps: int) -> Json:
    """Hold the shared state after some steps; its digest."""
    me.kept["state"] = state = samples.SampleState(steps)
    return str(state.digest())


def digest(me: Rank) -> Json:
    """The digest of the shared state that is held."""
    return str(_state(me).digest())


def damage(me: Rank) -> None:
    """Change one value of the shared state."""
    _state(me).damage()


def cycles(me: Rank, count: int) -> Json:
    """Start and close new instances: what the process holds before, after the first, and after the last of them."""
    shm, counts = census.Shm(), [census.census()]
    for cycle in range(count):
        me.renew()
        for hook in _CYCLE:
            _call(me, hook, {"step": cycle, "incarnation": cycle + 1, "groups": [], "thread": hook == "quiesce"})
            shm.look()
        me.renew()
        counts.append(census.settled(counts[0]) if cycle == count - 1 else census.census())
    before, first, last = (plain(count) for count in (counts[0], counts[1], counts[-1]))
    return {"before": before, "first": first, "last": last, "shm": list(shm.left())}


def plain(count: census.Census) -> Json:
    """A census, as JSON."""
    return {kind: list(names) for kind, names in count.items()}


def collectives(me: Rank, group: Mapping[str, Json]) -> Json:
    """Run each kind of collective on a communicator of ``reinit_comms``; what came out wrong."""
    import torch

    made, ranks = _communicator(me, str(group["name"])).group, group["ranks"]
    if not isinstance(ranks, list):
        raise InstepError(f"a group without ranks: {group}")
    mine, size = ranks.index(me.rank), len(ranks)
    own = torch.full((5,), float(mine + 1))
    summed, root = own.clone(), own.clone()
    rows = [torch.empty(5) for _ in range(size)]
    made.allreduce([summed]).wait()
    made.broadcast([root]).wait()
    made.allgather([rows], [own]).wait()
    made.barrier().wait()
    expected = {
        "all_reduce": (summed, torch.full((5,), size * (size + 1) / 2)),
        "broadcast": (root, torch.full((5,), 1.0)),
        "all_gather": (torch.stack(rows), torch.arange(1.0, size + 1).unsqueeze(1).expand(size, 5)),
    }
    token = torch.full((1,), float(mine))
    if mine == 0:
        made.send([token], 1, 0).wait()
    elif mine == 1:
        made.recv([token], 0, 0).wait()
        expected["recv"] = (token, torch.zeros(1))
    return [f"{name} gave {got.tolist()}, not {want.tolist()}" for name, (got, want) in expected.items() if not torch.equal(got, want)]


def pend(me: Rank, group: Mapping[str, Json]) -> None:
    """Enter an all-reduce in a thread, and leave it there."""
    import torch

    made = _communicator(me, str(group["name"])).group
    outcome: list[str] = []

    def wait() -> None:
        try:
            made.allreduce([torch.ones(8)]).wait()
            outcome.append("it succeeded, though a member never took part")
        except RuntimeError:
            outcome.append("failed")

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    me.kept["pending"] = thread, outcome


def pended(me: Rank, seconds_each: float) -> Json:
    """What became of the all-reduce that was left: its outcome, or "stuck"."""
    match me.kept.pop("pending", None):
        case (threading.Thread() as thread, list(outcome)):
            thread.join(seconds_each)
            return str(outcome[0]) if outcome else "stuck"
    raise InstepError("nothing is pending")


def abandon(me: Rank, seconds_each: float) -> Json:
    """Abandon every communicator: which do not end their operations in time."""
    ended = {name: c.abandon() for name, c in _communicators(me).items()}
    me.kept["comms"] = {}
    end = threading.Event()
    for _ in range(int(seconds_each / 0.02)):
        ended = {name: over for name, over in ended.items() if not over()}
        if not ended:
            break
        end.wait(0.02)
    return list(ended)


def holdings(me: Rank) -> Json:
    """How many open files and native threads this process has."""
    held = census.census()
    return {kind: len(held[kind]) for kind in ("file", "native thread")}


def _call(me: Rank, hook: str, given: Mapping[str, Json]) -> Json:
    arguments = samples.arguments(me, hook, given)
    answers = [run() for _, run in me.plugins.each(hook, **arguments)]
    if not answers:
        return {"implemented": False}
    answer = answers[0]
    said: dict[str, Json] = {"implemented": True, "none": answer is None, "wrong": wrong_answer(hook, answer, arguments)}
    if hook in {"start", "announce"} and isinstance(answer, Mapping) and said["wrong"] is None:
        said["mapping"] = dict(answer)
    if hook == "reinit_comms" and answer is not None and said["wrong"] is None:
        names = [g.name for g in arguments["request"].groups]  # type: ignore[attr-defined]
        _communicators(me).update(zip(names, answer, strict=True))  # type: ignore[call-overload]
    if hook in {"restore_state", "resume_data", "verify"} and answer is not None and said["wrong"] is None:
        said["receipt"] = answer.model_dump(mode="json")  # type: ignore[attr-defined]
    return said


def _in_thread(run: Callable[[], Json]) -> Json:
    out: list[Json] = []
    failed: list[BaseException] = []

    def catch() -> None:
        try:
            out.append(run())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            failed.append(error)

    thread = threading.Thread(target=catch)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return out[0]


def _state(me: Rank) -> samples.SampleState:
    state = me.kept.get("state")
    if not isinstance(state, samples.SampleState):
        raise InstepError("no state is held: hold() comes first")
    return state


def _communicators(me: Rank) -> dict[str, Communicator]:
    made: dict[str, Communicator] = me.kept.setdefault("comms", {})  # type: ignore[assignment]
    return made


def _communicator(me: Rank, name: str) -> Communicator:
    if name not in _communicators(me):
        raise InstepError(f"group {name!r} was not connected")
    return _communicators(me)[name]
