"""Ranks of a small DDP training over a group that can be scripted, each a process; and that group."""

import hashlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

from instep.torch.shared import Shared
from instep.torch.works import finished

WORLD = 3
SECONDS = 40


class Group(dist.ProcessGroup):
    """Forwards to a gloo group if there is one, else loops back; can be scripted."""

    def __init__(self, inner: dist.ProcessGroupGloo | None, rank: int = 0, size: int = 1) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._inner, self._rank, self._size = inner, rank, size
        self._script: list[list[Tensor]] | None = None
        self.asked: list[str] = []

    @contextmanager
    def scripted(self, results: Sequence[Sequence[Tensor]]) -> Iterator[None]:
        self._script = [list(r) for r in results]
        try:
            yield
            assert not self._script
        finally:
            self._script = None

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return "scripted"

    def broadcast(self, *args: Any, **_: Any) -> Any:
        return self._run("broadcast", args[0], args)

    def allreduce(self, *args: Any, **_: Any) -> Any:
        return self._run("allreduce", args[0], args)

    def allgather(self, *args: Any, **_: Any) -> Any:
        if self._script is not None or self._inner is None:
            for row, tensor in zip(args[0], args[1], strict=True):
                for target in row:
                    target.copy_(tensor)
        return self._run("allgather", [t for row in args[0] for t in row], args)

    def barrier(self, *args: Any, **_: Any) -> Any:
        return self._run("barrier", [], args)

    def wait(self) -> None:
        if self._inner is not None:
            self.barrier().wait()

    def _run(self, name: str, outputs: list[Tensor], args: Sequence[object]) -> object:
        self.asked.append(name)
        if self._script is None and self._inner is not None:
            return getattr(self._inner, name)(*args)
        if name == "broadcast" and self._script:
            for target, source in zip(outputs, self._script.pop(0), strict=True):
                target.copy_(source)
        return finished(outputs)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(24, 24), nn.ReLU(), nn.BatchNorm1d(24))])


class Trainer:
    """One rank: a step is ``micro`` backward passes and a commit."""

    def __init__(self, group: Group, *, micro: int = 1, fresh: bool = False, **options: Any) -> None:
        self.group, self.micro, self.step = group, micro, 0
        with group.scripted([]) if fresh else _nothing():
            self.ddp = DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.004, **options)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-2)
        self.shared = Shared()
        self.shared.add("model", self.ddp)
        self.shared.add("optimizer", self.optimizer)
        self.shared.check_coverage()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.backwards(self.micro)
            self.shared.prepare()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            self.shared.commit()

    def backwards(self, count: int) -> None:
        for index in range(count):
            generator = torch.Generator().manual_seed(self.step * 100 + index * 10 + self.group.rank())
            self.ddp(torch.randn(16, 24, generator=generator)).pow(2).mean().backward()

    def buckets(self) -> list[int]:
        return [bucket.buffer().numel() for bucket in self.ddp.reducer._get_zeros_like_grad_buckets()]

    def digest(self) -> str:
        parts = [*self.ddp.parameters(), *self.ddp.buffers()]
        return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in parts)).hexdigest() + str(self.shared.world.digest())


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def exchange(trainer: Trainer, folder: Path, *, donor: int, lost: int) -> None:
    """What a plugin does, over files."""
    rank, path = trainer.group.rank(), folder / f"state-{trainer.step}"
    if rank == donor:
        schema, tensors = trainer.shared.world.describe()
        torch.save((schema, list(tensors)), path)
    trainer.group.wait()
    schema, tensors = torch.load(path)
    if rank == lost:
        for place, source in zip(trainer.shared.world.destination(schema, staged=False), tensors, strict=True):
            place.copy_(source)
        trainer.shared.world.accept()
    trainer.shared.world.align(schema)


Scenario = Callable[[Trainer, Path], Trainer]


def _rank(
    rank: int, folder: Path, scenarios: Sequence[Scenario | None], options: dict[str, Any], out: "Queue[tuple[int, list[str]]]"
) -> None:
    torch.set_num_threads(1)
    results = []
    for index, scenario in enumerate(scenarios):
        store = FileStore(str(folder / f"store-{index}"), WORLD)
        inner = dist.ProcessGroupGloo(store, rank, WORLD, timedelta(seconds=20))
        trainer = Trainer(Group(inner, rank, WORLD), **options)
        if scenario is not None:
            trainer = scenario(trainer, folder)
        trainer.run(6 - trainer.step)
        results.append(trainer.digest())
    out.put((rank, results))


def digests(folder: Path, scenarios: Sequence[Scenario | None], **options: Any) -> list[list[str]]:
    """For each scenario (``None``: no fault) the final digest of each rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    out = context.Queue()
    workers = [context.Process(target=_rank, args=(rank, folder, scenarios, options, out), daemon=True) for rank in range(WORLD)]
    for worker in workers:
        worker.start()
    try:
        by_rank = dict(out.get(timeout=SECONDS) for _ in workers)
    finally:
        for worker in workers:
            worker.join(5)
            worker.kill()
    return [list(row) for row in zip(*(by_rank[rank] for rank in range(WORLD)), strict=True)]
