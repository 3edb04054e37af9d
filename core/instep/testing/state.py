"""The laws of state that is restored: the donor's bytes or an error, and another attempt after one that was cut."""

from collections.abc import Collection
from typing import ClassVar

from instep.model import Json
from instep.testing.contract import broken
from instep.testing.drilled import DrilledContract
from instep.testing.samples import STEP
from instep.testing.walk import ACTS, Line, Walk


class StateContract(DrilledContract):
    """Laws of ``restore_state`` and ``verify``, over real processes and tensors."""

    covers: ClassVar[Collection[str]] = ("restore_state", "verify")

    def test_a_replacement_ends_with_its_donors_bytes(self) -> None:
        """Whichever rank was lost; and donors keep what they have."""
        self._need("restore_state")
        with self._walk() as walk:
            self._ready(walk)
            expected = self._hold(walk, STEP)
            for lost in range(self.ranks):
                walk.world.do(lost, f"{ACTS}:hold", steps=0)
                self._recovered(walk, lost)
                if (found := self._digests(walk)) != expected:
                    odd = [rank for rank in found if found[rank] != expected[rank]]
                    broken(f"restore_state of {self._who}: after rank {lost} was restored, the ranks {odd} do not hold the donors' bytes")

    def test_all_but_one_can_be_restored(self) -> None:
        """One living replica is enough."""
        self._need("restore_state")
        with self._walk() as walk:
            self._ready(walk)
            expected = self._hold(walk, STEP)
            lost = list(range(1, self.ranks))
            for rank in lost:
                walk.world.do(rank, f"{ACTS}:hold", steps=1)
            self._recovered(walk, *lost)
            if self._digests(walk) != expected:
                broken(f"restore_state of {self._who}: with rank 0 as the only donor, some rank does not hold its bytes")

    def test_a_cut_attempt_gives_way_and_the_next_one_works(self) -> None:
        """A donor that never comes: ``check`` ends the wait, and what was half received does no harm."""
        self._need("restore_state")
        silent, lost = 1, self.ranks - 1
        with self._walk() as walk:
            self._ready(walk)
            expected = self._hold(walk, STEP)
            walk.world.do(lost, f"{ACTS}:hold", steps=0)
            walk.incarnation += 1
            plan, taking = walk.plan(lost), [rank for rank in range(self.ranks) if rank != silent]
            for line in walk.call(
                "restore_state",
                taking,
                plan=plan,
                each=lambda r: {"fresh": r == lost},
                meanwhile=lambda: walk.world.interrupt(*taking),
            ):
                if line.answer.blocked:
                    broken(
                        f"restore_state of {self._who} on rank {line.rank} {line.answer}, though a newer incarnation was opened: call "
                        "recovery.check in every wait, and let its Interrupted pass"
                    )
            walk.quiesce()
            self._recovered(walk, lost)
            if self._digests(walk) != expected:
                broken(f"restore_state of {self._who}: the attempt after one that was cut does not give the donors' bytes")

    def test_verify_sees_one_wrong_value(self) -> None:
        """Equal bytes pass on all ranks; one changed value fails on all ranks."""
        self._need("verify")
        with self._walk() as walk:
            self._ready(walk)
            self._hold(walk, STEP)
            for line in self._verify(walk):
                if not line.answer.ok:
                    broken(f"verify of {self._who} on rank {line.rank} {line.answer}, though all ranks hold equal bytes")
            if all(line.none for line in self._verify(walk)):
                return
            walk.world.do(self.ranks - 1, f"{ACTS}:damage")
            if passed := [line.rank for line in self._verify(walk) if line.answer.ok]:
                broken(f"verify of {self._who} passed on the ranks {passed}, though rank {self.ranks - 1} holds another value")

    def _ready(self, walk: Walk) -> None:
        walk.start()
        walk.connect()

    def _hold(self, walk: Walk, steps: int) -> dict[int, Json]:
        answers = walk.world.together(walk.world.living, f"{ACTS}:hold", steps=steps)
        return {rank: answer.value for rank, answer in answers.items()}

    def _digests(self, walk: Walk) -> dict[int, Json]:
        return {rank: answer.value for rank, answer in walk.world.together(walk.world.living, f"{ACTS}:digest").items()}

    def _recovered(self, walk: Walk, *lost: int) -> None:
        walk.incarnation += 1
        plan = walk.plan(*lost)
        for line in walk.call("restore_state", plan=plan, each=lambda rank: {"fresh": rank in lost}):
            if line.answer.blocked:
                broken(self._late(line))
            if not line.answer.ok or line.said.get("wrong"):
                broken(f"restore_state of {self._who} on rank {line.rank} {line.said.get('wrong') or line.answer}")
            if line.none:
                broken(f"restore_state of {self._who} on rank {line.rank} returned None for a plan in which every rank holds a replica")

    def _verify(self, walk: Walk) -> list[Line]:
        walk.incarnation += 1
        return walk.call("verify", plan=walk.plan())
