"""One rank that uses the plugin by itself, with torch's ProcessGroupNCCL, and obeys JSON commands on its standard input."""

import json
import os
import sys
import threading
import time
from typing import Any

import torch

from instep.errors import InstepError, Interrupted
from instep.hooks import CommsRequest, Interruption, Job
from instep.model import AddressBook, Fault, Group
from instep_init_nccl import connect
from instep_init_nccl.plugin import InitNccl
from instep_init_nccl.store import BookStore

ASKED: list[str] = []


class Watched(BookStore):
    """Notes what torch does with the store."""

    def set(self, key: str, value: str | bytes) -> None:
        ASKED.append(f"set {key}")
        super().set(key, value)

    def get(self, key: str) -> bytes:
        ASKED.append(f"get {key}")
        return super().get(key)

    def multi_get(self, keys: Any) -> list[bytes]:
        ASKED.append(f"multi_get {' '.join(keys)}")
        return super().multi_get(keys)

    def check(self, keys: Any) -> bool:
        ASKED.append(f"check {' '.join(keys)}")
        return super().check(keys)


class Rank:
    """Each public method is a command."""

    def __init__(self, rank: int, settings: dict[str, Any]) -> None:
        self._rank, self._plugin = rank, InitNccl(share_gpus=True, **settings)
        self._stuck: threading.Thread | None = None
        self._outcome = "stuck"
        self._plugin.start(Job(rank=rank, world_size=4, local_rank=rank, birth=0, host="127.0.0.1", secret=b"job"))
        self._made: dict[str, Any] = {}
        self._device = torch.device("cuda", 0)

    def announce(self, groups: list[Any]) -> Any:
        return {"init_nccl": dict(self._plugin.announce([Group.model_validate(g) for g in groups]) or {})}

    def connect(self, groups: list[Any], book: Any, give_up_after: float | None = None) -> Any:
        own = [Group.model_validate(g) for g in groups]
        parsed = AddressBook.model_validate(book)
        begun = time.monotonic()

        def check() -> None:
            if give_up_after is not None and time.monotonic() - begun > give_up_after:
                raise Interrupted

        made = self._plugin.reinit_comms(CommsRequest("nccl", self._rank, parsed.incarnation, own, parsed, check))
        assert made is not None
        self._made = {group.name: one for group, one in zip(own, made, strict=True)}
        return [type(one.group).__name__ for one in made]

    def message(self, group: str, to: int | None = None, source: int | None = None) -> None:
        tensor = torch.empty(4, device=self._device)
        if to is not None:
            self._made[group].backend.send([tensor], to, 0)
        if source is not None:
            self._made[group].backend.recv([tensor], source, 0)

    def allreduce(self, group: str) -> None:
        """Issue one and forget it."""
        self._made[group].group.allreduce([torch.empty(4, device=self._device)])

    def total(self, group: str, value: float) -> float:
        """The sum over the group."""
        tensor = torch.full((4,), value, device=self._device)
        self._made[group].group.allreduce([tensor]).wait()
        torch.cuda.synchronize()
        return float(tensor[0])

    def get_stuck(self, group: str) -> None:
        """Enter an all-reduce in a thread, and stay there."""

        def wait() -> None:
            torch.cuda.set_device(self._device)
            try:
                self._outcome = f"done with {self.total(group, 1.0)}"
            except RuntimeError as error:
                self._outcome = type(error).__name__

        self._outcome = "stuck"
        self._stuck = threading.Thread(target=wait, daemon=True)
        self._stuck.start()

    def outcome(self, seconds: float) -> list[Any]:
        """Whether the thread has come back, and how."""
        assert self._stuck is not None
        self._stuck.join(seconds)
        return [not self._stuck.is_alive(), self._outcome]

    def memory(self) -> dict[str, int]:
        """Bytes: free on the device, and resident in this process."""
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return {"device_free": torch.cuda.mem_get_info(self._device)[0], "resident": resident}

    def quiesce(self, incarnation: int) -> None:
        fault = Fault(kind="exit", ranks=(0,), detail="", detected_by="check", at=0.0)
        self._plugin.quiesce(Interruption(incarnation, fault, acknowledging=True))
        self._made = {}

    def asked(self) -> list[str]:
        out, ASKED[:] = list(ASKED), []
        return out

    def holdings(self) -> list[int]:
        return [len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))]

    def threads(self) -> list[str]:
        return sorted(thread.name for thread in threading.enumerate())

    def versions(self) -> list[str]:
        return [torch.__version__, ".".join(map(str, torch.cuda.nccl.version()))]


def main() -> None:
    vars(connect)["BookStore"] = Watched
    rank = Rank(int(sys.argv[1]), json.loads(sys.argv[2]))
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply = {"value": getattr(rank, command.pop("op"))(**command)}
        except (InstepError, Interrupted, RuntimeError) as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
