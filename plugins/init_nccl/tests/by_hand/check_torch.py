"""By hand: which keys torch's ProcessGroupNCCL asks for, and that the plugin answers exactly those, without a GPU.

    python plugins/init_nccl/tests/by_hand/check_torch.py        (gcc, and an environment with a CUDA build of torch and instep)

torch and ncclGetUniqueId are as they are shipped; the CUDA runtime and NCCL's communicators are ``fake_cuda.c``, which does NCCL's
bootstrap over real sockets and nothing else. The outcome belongs into docs/reference/nccl.md.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
SIZE = 4
Wire = Any
GROUPS: dict[str, tuple[int, ...]] = {"world": (0, 1, 2, 3), "left": (0, 1), "right": (3, 2), "odd": (1, 2, 3)}


class World:
    """Ranks with one setting of TORCH_NCCL_RANKS_PER_ROOT."""

    def __init__(self, folder: Path, per_root: int, **settings: Wire) -> None:
        self.log = folder / f"{per_root}-{len(settings)}.jsonl"
        self.log.touch()
        self._settings = settings
        path = os.pathsep.join(str(ROOT / part) for part in ("core", "plugins/init_nccl"))
        self._environment = {
            **os.environ,
            "PYTHONPATH": path,
            "LD_PRELOAD": str(folder / "libcuda.so.1"),
            "LD_LIBRARY_PATH": str(folder),
            "FAKE_NCCL_LOG": str(self.log),
            "NCCL_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "TORCH_NCCL_RANKS_PER_ROOT": str(per_root),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "TORCH_NCCL_ENABLE_MONITORING": "0",
            "PYTHONWARNINGS": "ignore",
        }
        self.incarnation = -1
        self._ranks = [self._start(rank) for rank in range(SIZE)]

    def _start(self, rank: int) -> "subprocess.Popen[str]":
        words = [sys.executable, str(HERE.parent / "nccl_rank.py"), str(rank), json.dumps({"revoke": False, **self._settings})]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._environment, text=True)

    def replace(self, rank: int) -> None:
        self._ranks[rank].kill()
        self._ranks[rank].communicate()
        self._ranks[rank] = self._start(rank)

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.communicate()

    def all(self, op: str, ranks: Sequence[int] = range(SIZE), each: Wire = None, **arguments: Wire) -> list[Wire]:
        """One command on several ranks at once."""
        for rank in ranks:
            stdin = self._ranks[rank].stdin
            assert stdin is not None
            stdin.write(json.dumps({"op": op, **arguments, **(each(rank) if each else {})}) + "\n")
            stdin.flush()
        replies = []
        for rank in ranks:
            stdout = self._ranks[rank].stdout
            assert stdout is not None
            replies.append(json.loads(stdout.readline()))
        return replies

    def ask(self, op: str, ranks: Sequence[int] = range(SIZE), each: Wire = None, **arguments: Wire) -> list[Wire]:
        """The same, and nothing may go wrong."""
        replies = self.all(op, ranks, each, **arguments)
        assert all("value" in reply for reply in replies), replies
        return [reply["value"] for reply in replies]

    def book(self, names: Sequence[str]) -> tuple[Wire, Wire]:
        groups = {r: [{"name": n, "ranks": GROUPS[n], "backend": "nccl"} for n in names if r in GROUPS[n]] for r in range(SIZE)}
        notes = self.ask("announce", each=lambda rank: {"groups": groups[rank]})
        addresses = [{"rank": rank, "birth": 0, "host": "127.0.0.1"} for rank in range(SIZE)]
        return groups, {"incarnation": self.incarnation, "addresses": addresses, "notes": notes}

    def connect(self, names: Sequence[str]) -> list[Wire]:
        """The next incarnation; the communicators that NCCL was asked for since the last one."""
        self.incarnation += 1
        self.ask("quiesce", incarnation=self.incarnation)
        before = len(self.log.read_text().splitlines())
        groups, book = self.book(names)
        kinds = self.ask("connect", each=lambda rank: {"groups": groups[rank], "book": book})
        assert {kind for rank in kinds for kind in rank} == {"ProcessGroup"}
        return self.told(before)

    def told(self, before: int) -> list[Wire]:
        return [json.loads(line) for line in self.log.read_text().splitlines()[before:]]


def rings(told: Sequence[Wire], names: Sequence[str]) -> None:
    """Every group is one ring, all members of a group were given the same ids, and no two groups an equal one."""
    by_ids: dict[tuple[str, ...], list[Wire]] = {}
    for one in told:
        by_ids.setdefault(tuple(one["ids"]), []).append(one)
    assert sorted(len(ring) for ring in by_ids.values()) == sorted(len(GROUPS[name]) for name in names), "members with different ids"
    for ring in by_ids.values():
        assert all(one["result"] == 0 and one["next"] == (one["rank"] + 1) % one["ranks"] for one in ring), ring
        assert sorted(one["rank"] for one in ring) == list(range(ring[0]["ranks"]))


def expected(rank: int, names: Sequence[str], per_root: int) -> list[str]:
    """What torch asks on one rank while it connects groups of these names."""
    out = []
    for members in (GROUPS[name] for name in names if rank in GROUPS[name]):
        size, own = len(members), members.index(rank)
        if size <= per_root:
            out.append(f"{'get' if own else 'set'} 0")
            continue
        count = -(-size // per_root)
        each, more = divmod(size, count)
        firsts = [root * each + min(root, more) for root in range(count)]
        out += [f"set UniqueNCCLID:{firsts.index(own)}"] if own in firsts else []
        out.append("multi_get " + " ".join(f"UniqueNCCLID:{root}" for root in range(count)))
    return out


def keys(folder: Path, per_root: int) -> None:
    """Several groups over several incarnations, a replaced rank among them: exactly these keys, and right rings each time."""
    world = World(folder, per_root)
    try:
        print("  torch, NCCL:", *world.ask("versions")[0])
        names = list(GROUPS)
        for turn in range(4):
            if turn == 2:
                world.replace(2)
            rings(world.connect(names), names)
            asked = world.ask("asked")
            assert asked == [expected(rank, names, per_root) for rank in range(SIZE)], asked
        print("  keys of rank 1:", *expected(1, names, per_root), sep="\n    ")
        before = len(world.told(0))
        world.ask("allreduce", group="world")
        assert len(world.told(0)) == before
        assert world.ask("asked") == [[]] * SIZE, "a collective asked again"
    finally:
        world.close()


def pairs(folder: Path, per_root: int) -> None:
    """Without eager connecting, single messages make communicators of pairs, whose ids come from the lower rank."""
    world = World(folder, per_root, eager=False)
    try:
        assert world.connect(["world"]) == []
        world.ask("message", each=lambda rank: {"group": "world", **({"source": rank - 1} if rank % 2 else {"to": rank + 1})})
        asked = world.ask("asked")
        assert asked == [["set 0:1"], ["get 0:1"], ["set 2:3"], ["get 2:3"]], asked
        assert [one["next"] for one in sorted(world.told(0), key=lambda one: one["rank"])] == [1, 1, 0, 0]
        world.ask("allreduce", group="world")
        assert world.ask("asked") == [expected(rank, ["world"], per_root) for rank in range(SIZE)]
        print("  keys of the pairs: 0:1, 2:3; then those of the whole group")
    finally:
        world.close()


def absent(folder: Path) -> None:
    """A member that never comes: the rank before it waits, gives up when interrupted, leaves no thread, and the next incarnation works.

    The others have their neighbours; in NCCL they would wait in the ring, whose sockets break when that rank gives up.
    """
    world = World(folder, 1, connect_timeout=20.0, abort_timeout=5.0)
    try:
        rings(world.connect(["world"]), ["world"])
        threads = world.ask("threads")
        world.incarnation += 1
        world.ask("quiesce", incarnation=world.incarnation)
        groups, book = world.book(["world"])
        replies = world.all("connect", range(3), lambda rank: {"groups": groups[rank], "book": book, "give_up_after": 0.5})
        assert ["value" in reply for reply in replies] == [True, True, False], replies
        assert replies[2]["error"].startswith("Interrupted"), replies
        rings(world.connect(["world"]), ["world"])
        left = world.ask("threads")
        assert left == threads, left
        print("  the rank before it gave up, and all four met again")
    finally:
        world.close()


def leaks(folder: Path) -> None:
    """Threads and descriptors over 50 incarnations."""
    world = World(folder, 1, abort_timeout=6.0)
    try:
        for turn in range(51):
            rings(world.connect(["world", "left"]), ["world", "left"])
            if turn == 10:
                before = world.ask("holdings")
        after = world.ask("holdings")
        print(f"  threads and descriptors after 10 incarnations {before}, after 50 {after}")
        assert all(new[0] <= old[0] + 2 and new[1] <= old[1] + 2 for old, new in zip(before, after, strict=True))
    finally:
        world.close()


def job(folder: Path) -> None:
    """A drill of a whole job: two ranks killed, an exception on the third, all of it recovered in process."""
    settings = {"init_gloo": True, "state_replica": True, "init_nccl": {"share_gpus": True, "revoke": False}}
    log = folder / "job.jsonl"
    log.touch()
    environment = {
        **os.environ,
        "LD_PRELOAD": str(folder / "libcuda.so.1"),
        "LD_LIBRARY_PATH": str(folder),
        "FAKE_NCCL_LOG": str(log),
        "NCCL_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
        **{f"INSTEP_PLUGINS__{name.upper()}": json.dumps(value) for name, value in settings.items()},
    }
    faults = ["--kill", "1@4", "--kill", "0@6", "--raise", "2@8"]
    words = [sys.executable, "-m", "instep", "drill", "--backend", "nccl", "--ranks", "3", "--steps", "12", *faults, "--json"]
    done = subprocess.run([*words, str(HERE / "job.py")], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["ok"]
    assert verdict["bitwise_equal"]
    assert [incident["scope"] for incident in verdict["incidents"]] == ["in_process"] * 3
    told = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(one["result"] == 0 and one["next"] == (one["rank"] + 1) % one["ranks"] for one in told)
    phases = [phase for incident in verdict["incidents"] for phase in incident["phases"] if phase["plugin"] == "init_nccl"]
    seconds = max(phase["seconds"] for phase in phases)
    print(f"  three faults, recovered in process; NCCL groups connected again in at most {1e3 * seconds:.0f} ms")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = str(HERE / "fake_cuda.c")
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-w", "-o", str(folder / "libcuda.so.1"), source], check=True)
        for per_root, what in ((1, "a root for each rank"), (2, "a root for two ranks"), (128, "a single root")):
            print(f"{what} (TORCH_NCCL_RANKS_PER_ROOT={per_root})")
            keys(folder, per_root)
            pairs(folder, per_root)
        print("a member that is absent")
        absent(folder)
        print("many incarnations")
        leaks(folder)
        print("a whole job")
        job(folder)
    print("all as expected")


if __name__ == "__main__":
    main()
