"""Joining the job: the agent's first words, plugins, the default process group. Done once by each birth of a rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from instep.board import Board
from instep.config import Config
from instep.errors import InstepError, PluginError
from instep.hooks import Job
from instep.messages import Hello, Message, Setup, Welcome
from instep.model import Address, Group, Plan, Role
from instep.plugins import LoadedPlugins
from instep.torch.comms import Comms

if TYPE_CHECKING:
    from instep.torch.local import LocalRank

_FIRST_WORDS = 60.0


@dataclass(frozen=True)
class Told:
    """What the agent said first."""

    config: Config
    secret: bytes


def first_words(board: Board) -> Told:
    """Wait for the configuration and the job's secret."""
    board.wait(lambda b: b.setup is not None, what="the agent's first message", seconds=_FIRST_WORDS)
    setup = board.setup
    if not isinstance(setup, Setup):
        raise InstepError("the agent sent no set-up")
    return Told(Config.model_validate(dict(setup.config), strict=False), bytes.fromhex(setup.secret))


def start_plugins(plugins: LoadedPlugins, job: Job) -> Address:
    """Run ``start`` of every plugin; the address of this birth with all ports."""
    ports: dict[str, int] = {}
    for plugin, start in plugins.each("start", job=job):
        opened = start()
        for name, port in opened.items() if isinstance(opened, Mapping) else ():
            if name in ports:
                raise PluginError(f"plugin {plugin!r} and another one both announce a port named {name!r}")
            ports[name] = port
    return Address(rank=job.rank, birth=job.birth, host=job.host, ports=ports)


def begin(local: "LocalRank") -> int:
    """At the first block, before anything of it: go on from an earlier run if a plugin has one. Returns the step to begin with."""
    standing, book = local.standing, local.comms.book
    local.state.complete()
    if book is not None:
        roles = (Role.RESTORE,) * local.world_size
        plan = Plan(incarnation=local.board.current, block=standing.block, step=standing.step, roles=roles, donors={}, book=book)
        step = local.lifecycle.begin(local.recovery(plan))
        if step is not None:
            standing.moved_to(standing.block, step)
    return standing.step


def say_hello(board: Board, comms: Comms, address: Address, *, first: Group, tell: Callable[[Message], None]) -> Welcome:
    """Introduce this birth, which announces the group that is made ``first``. The first births of a job wait here for all ranks."""
    notes = comms.announce([first])
    tell(Hello(rank=address.rank, birth=address.birth, address=address, notes=notes))
    board.wait(lambda b: b.welcome is not None, what="all ranks to call instep.init()")
    welcome = board.welcome
    if not isinstance(welcome, Welcome):
        raise InstepError("the agent sent no welcome")
    comms.book = welcome.book
    return welcome
