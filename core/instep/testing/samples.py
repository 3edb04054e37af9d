"""Arguments for every hook, as a job of ``size`` ranks would give them; the contracts call plugins with these."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from instep.hooks import CommsRequest, Interruption, Job, Recovery
from instep.model import Address, AddressBook, Attempt, Fault, Group, IncidentReport, Json, Plan, Receipt, Status, Vote
from instep.testing.peer import SECRET, Rank

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from instep.torch.shared import Shared

HOST = "127.0.0.1"
STEP = 7
WIDTH = 64


class SampleState:
    """The shared state of a rank after ``steps`` steps: a small network and its AdamW. torch is imported when a hook first asks."""

    name, layouts = "replica", True
    replicas: tuple[int, ...] = ()

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._shared: Shared | None = None

    def present(self) -> tuple[object, list[object]]:
        """The live tree."""
        return self.real().world.present()

    def describe(self) -> "tuple[bytes, Sequence[Tensor]]":
        """The schema and the tensors of what this rank holds."""
        return self.real().world.describe()

    def destination(self, schema: bytes, *, staged: bool) -> "Sequence[Tensor]":
        """Tensors to receive into."""
        return self.real().world.destination(schema, staged=staged)

    def accept(self) -> None:
        """Take over what arrived."""
        self.real().world.accept()

    def align(self, schema: bytes) -> None:
        """Bring reducers to the donor's layout."""
        self.real().world.align(schema)

    def digest(self) -> int:
        """Digest of all shared state."""
        return self.real().world.digest()

    def damage(self) -> None:
        """Change one value, as a bad memory cell would."""
        self.real()
        next(self.model.parameters()).data.view(-1)[0] += 1

    def real(self) -> "Shared":
        """The state that a session would hold."""
        if self._shared is None:
            import torch
            from torch import nn

            from instep.torch.shared import Shared

            torch.manual_seed(self.steps)
            self.model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
            self.optimizer: Optimizer = torch.optim.AdamW(self.model.parameters())
            for _ in range(self.steps):
                self.model(torch.randn(2, WIDTH)).sum().backward()
                self.optimizer.step()
            self._shared = Shared()
            for name, obj in (("model", self.model), ("optimizer", self.optimizer), ("info", {"steps": self.steps})):
                self._shared.add(name, obj)
            self._shared.check_coverage()
        return self._shared


def fault(*, rank: int = 0) -> Fault:
    """A rank that died."""
    return Fault(
        kind="exit", ranks=(rank,), detail=f"rank {rank} was killed", detected_by="agent", at=time.monotonic(), signature=f"exit:{rank}"
    )


def world_group(size: int, backend: str) -> Group:
    """The default process group."""
    return Group(name="0", ranks=tuple(range(size)), backend=backend)


def job(me: Rank) -> Job:
    """The job as this rank sees it."""
    return Job(rank=me.rank, world_size=me.size, local_rank=me.rank, birth=me.birth, host=HOST, secret=SECRET)


def book(size: int, incarnation: int) -> AddressBook:
    """Ranks that nobody can reach."""
    return AddressBook(incarnation=incarnation, addresses=tuple(Address(rank=rank, birth=0, host=HOST) for rank in range(size)))


def votes(size: int, incarnation: int) -> list[Vote]:
    """Rank 0 was replaced, all others are clean."""
    out = []
    for rank in range(size):
        status, step = (Status.FRESH, 0) if rank == 0 and size > 1 else (Status.CLEAN, STEP)
        address = Address(rank=rank, birth=int(status is Status.FRESH), host=HOST)
        shards = {"replica": tuple(range(size))}
        out.append(
            Vote(rank=rank, birth=0, incarnation=incarnation, block=0, step=step, status=status, groups=(), address=address, shards=shards)
        )
    return out


def incident() -> IncidentReport:
    """An incident of one attempt."""
    what = fault()
    receipt = Receipt(phase="restore_state", plugin="state_replica", rank=0, seconds=0.05, bytes=4096, verified=True)
    return IncidentReport(
        incident=1, fault=what, attempts=(Attempt(incarnation=1, fault=what),), scope="in_process", step=STEP, steps_lost=0,
        phases=(receipt,), seconds_to_resume=0.2, seconds_to_step=0.3, bytes_moved=4096, verified=True,
    )  # fmt: skip


def recovery(me: Rank, *, plan: Json, fresh: bool, seconds: float) -> Recovery:
    """One attempt on this rank, towards ``plan``."""
    state = me.kept.setdefault("state", SampleState(STEP))
    if isinstance(state, SampleState):
        state.replicas = tuple(range(me.size))
    points: list[str] = []
    me.kept["points"] = points
    return Recovery(
        plan=Plan.model_validate(plan),
        rank=me.rank,
        fresh=fresh,
        torn=False,
        secret=SECRET,
        shards=(state,),  # type: ignore[arg-type]
        check=me.check,
        gather=me.gather,
        point=points.append,
        deadline=time.monotonic() + seconds,
    )


def request(me: Rank, *, groups: Json, book: Json) -> CommsRequest:
    """Groups of this rank to connect, of one backend."""
    parsed = AddressBook.model_validate(book)
    own = _groups(groups)
    return CommsRequest(own[0].backend, me.rank, parsed.incarnation, own, parsed, me.check)


def arguments(me: Rank, hook: str, given: Mapping[str, Json]) -> dict[str, object]:
    """What a hook is called with; ``given`` is JSON that says more."""
    incarnation = int(str(given.get("incarnation", 1)))
    makers: dict[str, Callable[[], dict[str, object]]] = {
        "start": lambda: {"job": job(me)},
        "announce": lambda: {"groups": _groups(given.get("groups", []))},
        "committed": lambda: {"step": int(str(given.get("step", STEP)))},
        "keep": lambda: {"step": int(str(given.get("step", STEP))), "book": book(me.size, incarnation)},
        "quiesce": lambda: {"interruption": Interruption(incarnation, fault(rank=me.size - 1), bool(given.get("acknowledging")))},
        "plan": lambda: {"votes": votes(me.size, incarnation)},
        "reinit_comms": lambda: {"request": request(me, groups=given["groups"], book=given["book"])},
        "report": lambda: {"incident": incident()},
    }
    if hook in {"begin", "restore_state", "resume_data", "verify"}:
        seconds = float(str(given.get("seconds", 20.0)))
        return {"recovery": recovery(me, plan=given["plan"], fresh=bool(given.get("fresh")), seconds=seconds)}
    return makers[hook]() if hook in makers else {}


def _groups(groups: Json) -> list[Group]:
    return [Group.model_validate(g) for g in groups] if isinstance(groups, list) else []
