"""The laws of communicators: right sums, an end for whatever hangs, and connections that can be made again and again."""

from collections.abc import Collection
from typing import ClassVar

from instep.model import Group
from instep.testing.contract import broken
from instep.testing.drilled import DrilledContract
from instep.testing.samples import world_group
from instep.testing.walk import ACTS, Line, Walk

TURNS = 12


class CommsContract(DrilledContract):
    """Laws of ``reinit_comms``, over real processes. ``backend`` is the name under which scripts ask for it."""

    covers: ClassVar[Collection[str]] = ("reinit_comms",)
    backend: ClassVar[str] = "gloo"
    ranks: ClassVar[int] = 4

    def test_collectives_are_right(self) -> None:
        """Sums, copies, barriers and messages, in the world and in groups of it."""
        self._need("reinit_comms")
        groups = self._groups()
        with self._walk() as walk:
            walk.start()
            self._connected(walk, *groups)
            for group in groups:
                self._collectives(walk, group)

    def test_none_for_a_backend_of_somebody_else(self) -> None:
        """``None`` for a backend that it does not know: another plugin's turn."""
        self._need("reinit_comms")
        with self._walk(2) as walk:
            walk.start()
            for line in walk.connect(world_group(2, "no_such_backend")):
                if line.none is not True:
                    broken(f"reinit_comms of {self._who} for the backend 'no_such_backend' {line.answer}; it must return None")

    def test_quiesce_ends_what_waits_for_a_silent_rank(self) -> None:
        """A collective that a stopped rank never enters fails once the others are told to be quiet."""
        self._need("reinit_comms", "quiesce")
        last = self.ranks - 1
        with self._walk() as walk:
            walk.start()
            self._connected(walk)
            others = [rank for rank in walk.world.living if rank != last]
            walk.world.stop(last)
            walk.world.together(others, f"{ACTS}:pend", group=walk.everyone.model_dump(mode="json"))
            walk.call("quiesce", others, incarnation=1, thread=True)
            limit = self._limit("quiesce")
            for rank, answer in walk.world.together(others, f"{ACTS}:pended", seconds=2 * limit + 5, seconds_each=limit).items():
                if answer.value != "failed":
                    broken(
                        f"after quiesce of {self._who} on rank {rank} a collective that waits for a stopped rank is still going on "
                        f"({answer.value or answer}) after {limit:g} s: it must fail, or the main thread never unwinds"
                    )

    def test_a_replacement_is_connected(self) -> None:
        """A rank that died comes back as another process; old communicators do no harm."""
        self._need("reinit_comms", "quiesce")
        with self._walk() as walk:
            walk.start()
            self._connected(walk)
            for victim in (self.ranks - 1, 0):
                walk.world.kill(victim)
                walk.quiesce()
                walk.world.replace(victim)
                walk.start([victim])
                self._connected(walk)
                self._collectives(walk, walk.everyone)

    def test_connecting_gives_way_to_a_newer_fault(self) -> None:
        """While a peer never comes, ``check`` is called, and its ``Interrupted`` ends the attempt; the next one works."""
        self._need("reinit_comms", "quiesce")
        last = self.ranks - 1
        others = list(range(last))
        with self._walk() as walk:
            walk.start()
            for line in walk.connect(ranks=others, meanwhile=lambda: walk.world.interrupt(*others)):
                self._gives_way(line)
            walk.quiesce()
            self._connected(walk)
            self._collectives(walk, walk.everyone)

    def test_nothing_piles_up_over_incarnations(self) -> None:
        """Open files and threads are the same after many recoveries as after a few."""
        self._need("reinit_comms", "quiesce")
        with self._walk() as walk:
            walk.start()
            counts: list[dict[int, dict[str, int]]] = []
            for turn in range(TURNS):
                self._connected(walk, *self._groups())
                walk.quiesce()
                if turn in (TURNS // 3, TURNS - 1):
                    counts.append(self._holdings(walk))
            for rank, early in counts[0].items():
                late = counts[1][rank]
                grown = {kind: (early[kind], late[kind]) for kind in early if late[kind] >= early[kind] + TURNS // 2}
                if grown:
                    broken(f"{self._who} on rank {rank} holds more with every recovery (after {TURNS // 3} and after {TURNS}): {grown}")

    def test_any_legal_order_of_connections(self) -> None:
        """Groups, faults and replacements in whatever order: every group that is connected adds up right."""
        self._need("reinit_comms", "quiesce")
        from instep.testing.connections import check

        with self._walk(3) as walk:
            check(walk, who=self._who)

    def _groups(self) -> list[Group]:
        size = self.ranks
        return [
            world_group(size, self.backend),
            Group(name="1", ranks=(0, 1), backend=self.backend),
            Group(name="2", ranks=tuple(range(size - 1, 0, -1)), backend=self.backend),
        ]

    def _connected(self, walk: Walk, *groups: Group) -> None:
        lines = walk.connect(*groups)
        for line in lines:
            if line.answer.blocked:
                broken(self._late(line))
            if not line.answer.ok or line.said.get("wrong") or line.none:
                broken(f"reinit_comms of {self._who} on rank {line.rank} {line.said.get('wrong') or line.answer}")

    def _collectives(self, walk: Walk, group: Group) -> None:
        given = group.model_dump(mode="json")
        for rank, answer in walk.world.together(list(group.ranks), f"{ACTS}:collectives", group=given).items():
            if not answer.ok or answer.value:
                broken(f"collectives of {self._who} in group {group.ranks} on rank {rank}: {answer.value or answer}")

    def _holdings(self, walk: Walk) -> dict[int, dict[str, int]]:
        answers = walk.world.together(walk.world.living, f"{ACTS}:holdings")
        return {rank: {k: int(str(v)) for k, v in a.value.items()} for rank, a in answers.items() if isinstance(a.value, dict)}

    def _gives_way(self, line: Line) -> None:
        if line.answer.blocked:
            broken(
                f"{line.hook} of {self._who} on rank {line.rank} {line.answer}, though a newer incarnation was opened: call the argument's "
                "`check` in every wait, and let its Interrupted pass"
            )
        if line.answer.ok:
            broken(f"{line.hook} of {self._who} on rank {line.rank} succeeded without rank {self.ranks - 1}, which never took part")
