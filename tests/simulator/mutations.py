"""Deliberate bugs in core, planted at run time: the text of one function is changed and compiled again in its own module.

A change whose text is not found any more is an error, so that no mutation silently stops to be one.
"""

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType

from instep import board, commit, lifecycle, plan, standing
from instep.agent import blocks, coordinator, deaths, planner, recovery, roster, startup


@dataclass(frozen=True)
class Mutation:
    """``changes``: texts to replace, and what by, in the function ``name`` of ``owner`` (a module or a class)."""

    title: str
    owner: object
    name: str
    changes: tuple[tuple[str, str], ...]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Core with this bug."""
        sound = inspect.getattr_static(self.owner, self.name)
        users = [m for m in (self.owner, *_MODULES) if m.__dict__.get(self.name) is sound]
        wrong = self._compiled(sound)
        for user in users:
            setattr(user, self.name, wrong)
        try:
            yield
        finally:
            for user in users:
                setattr(user, self.name, sound)

    def _compiled(self, sound: FunctionType) -> Callable[..., object]:
        text = textwrap.dedent(inspect.getsource(sound))
        for old, new in self.changes:
            if text.count(old) != 1:
                raise AssertionError(f"mutation {self.title!r}: {old!r} is {text.count(old)} times in {self.name}; bring it up to date")
            text = text.replace(old, new)
        made: dict[str, Callable[..., object]] = {}
        exec(compile(text, f"<{self.title}>", "exec"), sound.__globals__, made)
        return made[self.name]


_MODULES = (board, commit, lifecycle, plan, standing, blocks, coordinator, deaths, planner, recovery, roster, startup)


def _mutation(title: str, owner: object, name: str, *changes: tuple[str, str]) -> Mutation:
    return Mutation(title, owner, name, changes)


MUTATIONS = (
    _mutation("commit without its barrier", commit.Commit, "_open", ("not barrier(s, done=False)", "False")),
    _mutation(
        "private state recorded behind the barrier",
        commit.Commit,
        "_open",
        ("s.state.private.write(s.step + 1)", "pass"),
        ("self._inside = s.gate.body = True", "s.state.private.write(s.step + 1); self._inside = s.gate.body = True"),
    ),
    _mutation("rolls forward whatever the plan", commit.Commit, "_may_roll_forward", ("is Role.ROLL_FORWARD", "is not None")),
    _mutation("a commit body leaves no mark", commit.Commit, "_open", ("s.standing.status = Status.TORN", "pass")),
    _mutation(
        "a torn rank counts as one that holds its step",
        plan,
        "held",
        ("_HOLDS.get(vote.status)", "_HOLDS.get(vote.status, 0 if vote.status is Status.TORN else None)"),
    ),
    _mutation("the plan depends on the order of votes", plan, "plan", ("sorted(votes, key=lambda v: v.rank)", "list(votes)")),
    _mutation("restoring ranks donate too", plan, "_donors", ("by_rank[r] is not Role.RESTORE", "r is not None")),
    _mutation("quiesce after the vote", lifecycle.Lifecycle, "quiesce", ("self._board.acknowledged >= incarnation or ", "")),
    _mutation(
        "the plan of an older incarnation is followed",
        lifecycle.Lifecycle,
        "_acknowledge",
        ("b.plan is not None and b.plan.incarnation == incarnation", "b.plan is not None"),
    ),
    _mutation("private state is not reloaded", lifecycle.Lifecycle, "_resume", ("self._local.reload(recovery.plan.step)", "pass")),
    _mutation(
        "nothing is verified",
        lifecycle.Lifecycle,
        "_attempt",
        ('self._timed("verify", plugin, functools.partial(_named, plugin, verify))', "pass"),
    ),
    _mutation("votes outlive their incarnation", recovery, "open_incarnation", ("member.vote = member.done", "member.done")),
    _mutation("a majority of votes is enough", recovery, "voted", ("len(votes) < job.terms.world", "2 * len(votes) <= job.terms.world")),
    _mutation(
        "a vote for an older incarnation counts",
        coordinator.Coordinator,
        "_message",
        ("case Voted() if message.vote.incarnation == job.life.incarnation:", "case Voted():"),
    ),
    _mutation(
        "news of an older incarnation count",
        coordinator.Coordinator,
        "_message",
        ("Closed() if message.incarnation == job.life.incarnation", "Closed() if message.incarnation <= job.life.incarnation"),
    ),
    _mutation("a replacement is not told of the recovery", startup, "hello", ("if job.incident is not None:", "if False:")),
    _mutation("a block is released when one rank knows", blocks, "closed", ("not all(m.closed", "not any(m.closed")),
    _mutation("a death opens no incarnation", deaths, "_replace", ("open_incarnation(job, fault, phase=phase)", "True")),
)
