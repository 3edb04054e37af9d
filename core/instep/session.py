"""The session: what a training script holds. ``init`` joins the job, ``protect`` names the state, blocks and commits do the rest."""

import atexit
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from instep.agent.channel import Environment
from instep.agent.records import State
from instep.block import Blocks, as_json
from instep.commit import Commit
from instep.engine import Engine
from instep.errors import ConfigError, PluginError, UsageError
from instep.hooks import Plugin
from instep.messages import Fatal, Once
from instep.model import Json
from instep.torch.local import LocalRank
from instep.torch.protect import protect

if TYPE_CHECKING:
    from instep.plain import PlainSession

BAD_PLUGIN = 2
"""Exit code of a job with a broken plugin or wrong settings, as of every other command."""
P = ParamSpec("P")
R = TypeVar("R")


class Session:
    """One rank's part in a job. Made by ``instep.init()``; one for each process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commit = Commit(engine)
        self._blocks = Blocks(engine, self._commit)
        self._calls = 0
        self._closed = False

    @property
    def step(self) -> int:
        """Number of steps committed so far: the index of the step being worked on."""
        return self._engine.step

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self._engine.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self._engine.world_size

    @property
    def local_rank(self) -> int:
        """Rank on this machine."""
        return self._engine.local.local_rank

    @property
    def incarnation(self) -> int:
        """Number of the communicator world; one higher after each attempt of a recovery."""
        return max(self._engine.board.current, 0)

    @property
    def device(self) -> torch.device:
        """The device of this rank: its CUDA device if there is one, else the CPU."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def incidents(self) -> int:
        """Recoveries that this process took part in."""
        return self._engine.local.incidents

    def protect(self, *, private: Mapping[str, object] | None = None, **objects: object) -> None:
        """Name the state that a replacement needs, before the first block.

        Keywords are shared state: modules (DDP too), optimizers, anything with ``state_dict``, tensors, plain dicts. Loaders and
        generators are private by type, as are module buffers; ``private`` adds objects that each rank has for itself.
        Raises ``UsageError`` for an object without state or of a kind that cannot be protected, naming it.
        """
        if self._engine.entered or self._engine.running:
            raise UsageError(f"session.protect({', '.join(objects)}) after the first block started: protect everything before it")
        protect(self._engine.local, self._commit, objects, private or {})

    def recoverable(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate the training loop: after a fault it is called again at the last commit."""
        return self._blocks.decorate(function)

    def commit(self) -> AbstractContextManager[None]:
        """The one place where shared state moves from step s to s+1, on all ranks or on none."""
        return self._commit

    def on_checkpoint(self, load: Callable[[int | None], int]) -> Callable[[int | None], int]:
        """For a script that saves by itself: how to load, when no rank holds some state any more. All ranks call it together.

        ``load(None)`` loads the newest checkpoint, ``load(step)`` the one of that step, into what is protected, loaders and generators
        too; it returns the number of steps done by then. Can be used as a decorator. Raises ``UsageError`` inside a block.
        """
        if self._engine.entered or self._engine.running:
            raise UsageError("session.on_checkpoint() after the first block started: call it before it")
        self._engine.state.loader = load
        return load

    def once(self, function: Callable[[], Json]) -> Json:
        """Run ``function`` once for each rank and job; a replacement gets the recorded result. The result must be JSON.

        Raises ``UsageError`` inside a block, which runs again after a fault, and for a result that JSON would change.
        """
        if self._engine.running:
            raise UsageError("session.once() inside a block, which may run more than once, or inside a commit: call it before the block")
        index, self._calls = self._calls, self._calls + 1
        recorded = self._engine.local.once
        if index < len(recorded):
            return recorded[index]
        plain, value = as_json(function())
        if not plain:
            raise UsageError(f"call {index} of session.once() returned what JSON cannot hold unchanged: use lists, dicts, numbers")
        self._engine.tell(Once(index=index, value=value))
        return value

    def close(self) -> None:
        """Leave the job; runs at exit by itself."""
        if not self._closed:
            self._closed = True
            if not self._engine.cut:
                self._engine.standing.at(State.ENDED)
            self._engine.local.close()

    def plugin(self, name: str) -> Plugin | None:
        """The instance of an enabled plugin, ``None`` if there is none: for plugins whose objects the script makes itself."""
        return self._engine.local.plugins.get(name)

    def point(self, name: str) -> None:
        """A place where a drill or a test may inject a fault."""
        self._engine.local.point(name)


_sessions: "list[Session | PlainSession]" = []
"""The session of this process; ``init`` may be called once."""


def current() -> Session | None:
    """The live session of this process, if any."""
    return next((session for session in _sessions if isinstance(session, Session)), None)


def init(*, step: int = 0) -> "Session | PlainSession":
    """Join the job and make the default process group.

    ``step`` is the number of steps already done, when a checkpoint was loaded. Without ``instep run`` the result behaves the same
    but recovers nothing, and a warning says so once. Raises ``UsageError`` when called twice or after ``init_process_group``.
    """
    if _sessions:
        raise UsageError("instep.init() was called twice in one process; keep the session and pass it around")
    if dist.is_initialized():
        raise UsageError("instep.init() makes the process group itself: remove the call of torch.distributed.init_process_group before it")
    environment = Environment.read()
    if environment.channel is None:
        warnings.warn("instep.init() without `instep run`: training works, but nothing is protected", stacklevel=2)
        return _plain(step)
    local = LocalRank(environment, step=step)
    if not local.config.enabled:
        local.withdraw()
        return _plain(step)
    try:
        session = Session(Engine(local))
    except (ConfigError, PluginError) as error:
        local.tell(Fatal(message=f"rank {local.rank}: {error}", code=BAD_PLUGIN))
        raise
    _sessions.append(session)
    atexit.register(session.close)
    return session


def _plain(step: int) -> "PlainSession":
    from instep.plain import PlainSession

    session = PlainSession(step=step)
    _sessions.append(session)
    return session
