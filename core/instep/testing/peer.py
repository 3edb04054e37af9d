"""One process of a test's world: obeys one command at a time, each the name of a function that gets this ``Rank`` and JSON values."""

import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

from instep.errors import InstepError, Interrupted
from instep.hooks import Plugin
from instep.model import Json
from instep.plugins import LoadedPlugins

SECRET = b"of a test's job"


@dataclass
class Rank:
    """What a command sees: who it is, the plugin under test, a world all-gather, and whatever earlier commands kept."""

    rank: int
    size: int
    birth: int
    pipe: Connection
    name: str = "plugin"
    target: str | None = None
    settings: Mapping[str, Json] = field(default_factory=dict)
    kept: dict[str, object] = field(default_factory=dict)
    plugins: LoadedPlugins = field(default_factory=LoadedPlugins)

    def renew(self) -> None:
        """A new instance of the plugin under test, with its settings."""
        if self.target is not None:
            plugin = named(self.target)
            if not (isinstance(plugin, type) and issubclass(plugin, Plugin)):
                raise InstepError(f"{self.target} is no plugin class")
            self.plugins = LoadedPlugins({self.name: plugin.model_validate(dict(self.settings))})

    def gather(self, data: bytes) -> Sequence[bytes]:
        """All-gather of byte strings over the ranks that were given the same command."""
        self.pipe.send_bytes(json.dumps({"gather": data.hex()}).encode())
        rows = self._hear()["rows"]
        return [bytes.fromhex(str(row)) for row in rows] if isinstance(rows, list) else []

    def check(self) -> None:
        """Raises ``Interrupted`` when the test has opened the next incarnation."""
        if self.pipe.poll():
            self._hear()

    def _hear(self) -> dict[str, Json]:
        message: dict[str, Json] = json.loads(self.pipe.recv_bytes())
        if "interrupt" in message:
            raise Interrupted("the test opened the next incarnation")
        return message


def serve(order: Mapping[str, Json], pipe: Connection, stacks: int) -> None:
    """Obey until the pipe ends."""
    sys.path[:] = [str(path) for path in order["path"]] if isinstance(order["path"], list) else sys.path
    rank, size, birth = (int(str(order[key])) for key in ("rank", "size", "birth"))
    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ.update(environment)  # noqa: TID251 - it looks like a rank of a job
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    me = Rank(rank, size, birth, pipe)
    if isinstance(settings := order.get("settings"), dict):
        me.settings = settings
    me.name, me.target = str(order.get("name") or "plugin"), str(order["plugin"]) if order.get("plugin") else None
    if "torch" in sys.modules:
        named("torch:set_num_threads")(1)  # type: ignore[operator]
    with suppress(EOFError, ConnectionError):
        while True:
            message = json.loads(pipe.recv_bytes())
            if "do" in message:
                pipe.send_bytes(json.dumps(_obey(me, str(message["do"]), message["with"])).encode())


def named(target: str) -> object:
    """What ``module:name`` stands for."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def _obey(me: Rank, target: str, arguments: Mapping[str, Json]) -> dict[str, Json]:
    try:
        return {"value": named(target)(me, **arguments)}  # type: ignore[operator]
    except BaseException as error:  # noqa: BLE001 - whatever a command raises is an answer
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        return {"error": type(error).__name__, "text": f"{error}{notes}", "where": _where(error)}


def _where(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent != Path(__file__).parent]
    frames = [f for f in frames if f.filename != named("instep.plugins:__file__")] or frames
    return f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""
