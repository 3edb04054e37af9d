"""A worker without torch: speaks the agent's protocol over the inherited channel, and misbehaves when told to.

``python fake_worker.py STEPS [WHAT@RANK@STEP ...]``; WHAT is kill, hang, sleep, exit3, raise, wait or outside. Each acts once, in birth 0,
from the step on; in capitals it acts again and again.
"""

import os
import select
import signal
import socket
import sys
import time

from instep.agent.channel import Environment
from instep.agent.records import Header, State
from instep.messages import (
    Closed,
    Closing,
    Committed,
    Decoder,
    Done,
    Faulted,
    Hello,
    Interrupt,
    Joined,
    Message,
    Planned,
    Release,
    Setup,
    Voted,
    Welcome,
    send,
)
from instep.model import Address, Fault, Status, Vote

PAUSE = 0.01


class Worker:
    def __init__(self) -> None:
        self.env = Environment.read()
        assert self.env.channel is not None
        self.rank, self.birth = self.env.rank, self.env.birth
        self.sock = socket.socket(fileno=self.env.channel.control)
        self.header = Header(self.env.channel.record)
        self.decoder, self.inbox = Decoder(), list[Message]()
        self.incarnation, self.step, self.fresh = 0, 0, self.birth > 0
        self.header.put("step", 0)
        self.state(State.SETUP)
        self.address = Address(rank=self.rank, birth=self.birth, host="127.0.0.1")

    def state(self, state: State) -> None:
        self.header.put("state", state)

    def tell(self, message: Message) -> None:
        send(self.sock, message)

    def pump(self, seconds: float) -> None:
        if select.select([self.sock], [], [], seconds)[0]:
            if not (data := self.sock.recv(65536)):
                os._exit(70)
            self.inbox += self.decoder.feed(data)

    def take(self, *kinds: type) -> Message | None:
        for message in self.inbox:
            if isinstance(message, kinds):
                self.inbox.remove(message)
                return message
        return None

    def wait(self, *kinds: type) -> Message:
        self.header.put("waiting", 1)
        for _ in range(6000):
            if (message := self.take(*kinds)) is not None:
                self.header.put("waiting", 0)
                return message
            self.pump(0.01)
        raise TimeoutError(str(kinds))

    def start(self) -> None:
        self.wait(Setup)
        self.tell(Hello(rank=self.rank, birth=self.birth, address=self.address, notes={"fake": self.rank}))
        welcome = self.wait(Welcome)
        assert isinstance(welcome, Welcome)
        if os.environ.get("DIE_IN_SETUP") == f"{self.rank}@{os.environ['TORCHELASTIC_RESTART_COUNT']}":
            os.kill(os.getpid(), signal.SIGKILL)
        print(f"welcome {welcome.incarnation} book={welcome.book is not None} once={list(welcome.once)}", flush=True)
        self.incarnation = welcome.incarnation
        if not self.fresh:
            self.join(0)

    def join(self, incarnation: int) -> None:
        self.header.put("joined", incarnation)
        self.state(State.STEP)
        self.incarnation, self.fresh = incarnation, False
        self.tell(Joined(incarnation=incarnation, block=0, step=self.step, at=time.monotonic()))
        self.first = True

    def recover(self, interrupt: Interrupt) -> None:
        self.state(State.RECOVERY)
        while True:
            status = Status.FRESH if self.fresh else Status.CLEAN
            vote = Vote(
                rank=self.rank, birth=self.birth, incarnation=interrupt.incarnation, block=0, step=self.step, status=status, groups=(),
                address=self.address, shards={"world": tuple(range(self.env.world_size))},
            )  # fmt: skip
            self.tell(Voted(vote=vote))
            answer = self.wait(Planned, Interrupt)
            if isinstance(answer, Interrupt):
                interrupt = answer
                continue
            assert isinstance(answer, Planned)
            self.step = answer.plan.step
            self.header.put("step", self.step)
            self.join(answer.plan.incarnation)
            return

    def train(self, steps: int, faults: list[list[str]]) -> None:
        while True:
            if isinstance(interrupt := self.take(Interrupt), Interrupt):
                self.recover(interrupt)
                continue
            if self.fresh:
                self.pump(0.05)
                continue
            if self.step < steps:
                self.work(faults)
                continue
            if self.finish():
                return

    def work(self, faults: list[list[str]]) -> None:
        self.pump(PAUSE)
        if any(isinstance(m, Interrupt) for m in self.inbox):
            return
        for fault in [f for f in faults if int(f[1]) == self.rank and self.step >= int(f[2])]:
            if fault[0].islower():
                faults.remove(fault)
            if self.birth == 0:
                self.misbehave(fault[0].lower())
                return
        self.step += 1
        self.header.put("step", self.step)
        if self.first:
            self.first = False
            self.tell(Committed(incarnation=self.incarnation, step=self.step, at=time.monotonic()))

    def misbehave(self, what: str) -> None:
        match what:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "sleep":
                time.sleep(60)
            case "exit3":
                sys.exit(3)
            case "outside":
                self.state(State.OUTSIDE)
                sys.exit(5)
            case "wait":
                self.header.put("waiting", 1)
                self.header.operation("world all_reduce")
                time.sleep(60)
            case "raise":
                fault = Fault(
                    kind="exception",
                    ranks=(self.rank,),
                    detail="boom",
                    detected_by="worker",
                    at=time.monotonic(),
                    signature=f"e:{self.step}",
                )
                self.tell(Faulted(incarnation=self.incarnation, fault=fault))
                interrupt = self.wait(Interrupt)
                assert isinstance(interrupt, Interrupt)
                self.recover(interrupt)

    def finish(self) -> bool:
        self.state(State.DONE)
        self.tell(Done(incarnation=self.incarnation, block=0, step=self.step))
        answer = self.wait(Closing, Interrupt)
        if isinstance(answer, Closing):
            self.tell(Closed(incarnation=self.incarnation, block=0))
            answer = self.wait(Release, Interrupt)
        if isinstance(answer, Interrupt):
            self.recover(answer)
            return False
        self.state(State.ENDED)
        return True


if __name__ == "__main__":
    worker = Worker()
    worker.start()
    worker.train(int(sys.argv[1]), [word.split("@") for word in sys.argv[2:]])
    print(f"end {worker.step}", flush=True)
