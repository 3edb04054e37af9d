"""Where births come from: a warm fork server where there is one, else plain interpreters."""

from collections.abc import Callable

from instep.agent.launch import Launch
from instep.agent.spawner import ForkServer, Interpreters, Listener, Server
from instep.agent.task import Fds, Task


class Nursery:
    """Starts the processes of one job. ``lent`` is a fork server that outlives the job, ``say`` a line for the console."""

    def __init__(self, launch: Launch, listener: Listener, *, lent: Server | None, say: Callable[[str], None]) -> None:
        self._launch, self._listener, self._say = launch, listener, say
        self._lent, self._own = lent, lent
        self._server: ForkServer | None = None
        self._interpreters = Interpreters(listener)

    @property
    def forking(self) -> bool:
        """Whether a fork server is there to be asked."""
        return self._server is not None

    async def open(self) -> None:
        """Start and warm the fork server, if there is to be one and none is there."""
        if not self._launch.preload or self._server is not None:
            return
        if self._own is None or self._own.stopped:
            self._own = Server(self._launch.server_environment())
        server = self._server = ForkServer(self._own, self._listener)
        problem, missing = await server.warm(self._launch.warmth())
        for told in missing:
            if told.partition(":")[0] in self._launch.config.preload or "ModuleNotFoundError" not in told:
                self._say(f"preloading failed, workers will import it themselves: {told}")
        if problem is not None:
            self._say(f"starting plain interpreters instead of forking: {problem}")
            self._server = None
            server.leave()

    def spawn(self, number: int, task: Task, fds: Fds, *, plain: bool) -> None:
        """Start a process for request ``number``; the listener hears of it."""
        if plain or self._server is None or not self._server.spawn(number, fds):
            self._interpreters.spawn(number, task, fds)

    def reap(self, pid: int) -> bool:
        """A process has exited: reap it if it was a plain interpreter, and notice now if it took the fork server with it."""
        if self._server is not None:
            self._server.check()
        return self._interpreters.reap(pid)

    def lost(self) -> None:
        """The fork server is gone."""
        self._server = None

    def close(self) -> None:
        """Leave the fork server, and end it unless it is lent."""
        if self._server is not None:
            self._server.leave()
        if self._own is not None and self._own is not self._lent and not self._own.stopped:
            self._own.stop()
