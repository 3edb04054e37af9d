"""Own checkpoints, as a rank deals with them: when to save, which one to load, and what to tell the others about a damaged one."""

import hashlib
import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from instep.errors import ConfigError, InstepError, NoCheckpoint
from instep.hooks import Holding, Job, Recovery
from instep.model import Json, Receipt
from instep_state_replica import checkpoint_files as files

if TYPE_CHECKING:
    from instep_state_replica.checkpoint_save import Saver

log = logging.getLogger(__name__)
_WORD = 64
NAME = "state_replica"
"""The plugin under whose name votes carry its notes."""


class Checkpoint(BaseModel):
    """The table ``[plugins.state_replica.checkpoint]``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dir: str = Field(min_length=1, description="folder that all ranks and the agent see")
    every: int = Field(ge=1, description="steps from one to the next")
    keep: int = Field(default=2, ge=1, description="complete ones to keep, the newest")
    resume: bool = Field(default=False, description="begin a job from the newest one in dir, if there is any")
    patience: float = Field(default=60.0, gt=0, description="seconds that training waits for the one before to be written")

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.dir).expanduser().absolute()


def damaged(notes: Iterable[Mapping[str, Json]], plugin: str = NAME) -> dict[str, str]:
    """Why a rank could not load a checkpoint, by its name, from what this plugin of all ranks told with their votes."""
    out: dict[str, str] = {}
    for told in notes:
        own = told.get(plugin)
        if isinstance(own, dict) and isinstance(names := own.get("damaged"), dict):
            out |= {name: str(why) for name, why in names.items()}
    return out


class Checkpoints:
    """The checkpoints of one rank of one job. ``open`` comes first; without settings none are saved."""

    def __init__(self) -> None:
        self._settings: Checkpoint | None = None
        self._save = ""
        self._damaged: dict[str, str] = {}
        self._none = ""
        self._saver: Saver | None = None
        self._holding: Holding | None = None

    def open(self, settings: Checkpoint | None, job: Job) -> None:
        """Get to know the job. Raises ``ConfigError`` when the folder is another run's, which this one is not to go on from."""
        self._rank, self._world, self._holding = job.rank, job.world_size, job.holding
        self._run = hashlib.sha256(b"instep run" + job.secret).hexdigest()[:16]
        self._settings = settings
        if settings is None:
            return
        foreign = None if settings.resume else next(iter(files.usable(settings.path, self._world, [])), None)
        if foreign is not None and foreign.run != self._run:
            raise ConfigError(
                f"plugins.state_replica.checkpoint.dir: {settings.path} holds {foreign.name} of another run; set "
                "plugins.state_replica.checkpoint.resume = true to go on from there, or name another folder"
            )
        files.tidy(settings.path, self._rank)

    @property
    def notes(self) -> Mapping[str, Json] | None:
        """What the agent must know: checkpoints that this rank could not load, and whether the script loads its own."""
        loads = self._holding is not None and self._holding.loads
        return {"damaged": dict(self._damaged), "loads": loads, "none": self._none} if self._damaged or loads else None

    def begin(self, recovery: Recovery) -> int | None:
        """Go on from the newest checkpoint that every rank can load, if this is asked for, or the whole job was started again.

        Raises:
            InstepError: there is one, and none that could be loaded.
        """
        settings, tried = self._settings, list[str]()
        if settings is None:
            return None
        self.renew(recovery)
        while choice := self._agreed(settings, recovery):
            try:
                found = files.read(settings.path / choice, self._world)
                self._load(found, recovery)
                failed = b""
            except (InstepError, files.Unusable) as error:
                self._damaged.setdefault(choice, str(error))
                failed = str(error).encode()[:_WORD]
                log.warning("%s is passed over: %s", choice, error)
            said = recovery.gather(failed.ljust(_WORD, b"\0"))
            if not any(word.strip(b"\0") for word in said):
                return found.step
            self._damaged.setdefault(choice, "not loadable on another rank")
            tried.append(choice)
        if tried:
            why = "; ".join(self._damaged[name] for name in tried)
            raise InstepError(f"no checkpoint in {settings.path} can be loaded: {why}; remove them to begin from the script's start")
        return None

    def committed(self, step: int) -> None:
        """Save if it is time to. A state that is about to change by itself is left out."""
        settings, holding = self._settings, self._holding
        self._none = ""
        if settings is None or step % settings.every or holding is None or not self._save or not holding.settled:
            return
        if self._saver is None:
            from instep_state_replica.checkpoint_save import Saver

            self._saver = Saver(
                settings.path, self._run, rank=self._rank, world=self._world, keep=settings.keep, patience=settings.patience
            )
        # All ranks save that step anew: what was wrong with the checkpoint of its name is gone with it.
        self._damaged.pop(files.name(step), None)
        self._saver.save(holding, step, self._save, damaged=frozenset(self._damaged))

    def restore(self, recovery: Recovery) -> Receipt:
        """Load the checkpoint of the plan.

        Raises:
            InstepError: it cannot be loaded; the next vote says so.
        """
        name, began = recovery.plan.checkpoint, time.monotonic()
        if name == files.OF_SCRIPT:
            step = self._by_script(recovery)
            seconds = time.monotonic() - began
            return Receipt(phase="restore_state", plugin="state_replica", rank=self._rank, seconds=seconds, step=step)
        if self._settings is None:
            raise InstepError(f"rank {self._rank} knows of no folder with {name}; state_replica has one configuration on all ranks")
        try:
            size = self._load(files.read(self._settings.path / name, self._world), recovery)
            seconds = time.monotonic() - began
            return Receipt(phase="restore_state", plugin="state_replica", rank=self._rank, seconds=seconds, bytes=size, verified=True)
        except files.Unusable as why:
            self._damaged[name] = str(why)
            raise InstepError(f"checkpoint {name} is {why}") from None

    def renew(self, recovery: Recovery) -> None:
        """All ranks are together: parts that they save from now on belong together, and to no others.

        What one could not load is damaged for all: it is none of those to keep.
        """
        if self._settings is not None:
            self._save = recovery.gather(os.urandom(8))[0].hex()
            for name, why in damaged(recovery.plan.book.notes).items():
                self._damaged.setdefault(name, why)

    def interrupt(self) -> None:
        """A fault: nobody may wait for storage. Callable from any thread."""
        if self._saver is not None:
            self._saver.interrupt()

    def close(self) -> None:
        """Let what is being written come to its end."""
        if self._saver is not None:
            self._saver.close()

    def _load(self, found: files.Checkpoint, recovery: Recovery) -> int:
        from instep_state_replica.checkpoint_load import Damaged, load

        try:
            return load(found, recovery, self._held())
        except Damaged as error:
            self._damaged[found.name] = error.why
            raise

    def _by_script(self, recovery: Recovery) -> int:
        """Have the script load, on all ranks the same step: the newest that all of them have."""
        recovery.point("restore")
        holding = self._held()
        try:
            found = holding.load(None)
        except NoCheckpoint as error:
            self._none = str(error) or "the script has none"
            raise
        steps = {int.from_bytes(row, "little") for row in recovery.gather(found.to_bytes(8, "little"))}
        return found if len(steps) == 1 else holding.load(min(steps))

    def _agreed(self, settings: Checkpoint, recovery: Recovery) -> str:
        """The newest checkpoint that nobody has failed to load, as rank 0 sees the folder; empty if there is none."""
        own, skipped = "", list[str]()
        if self._rank == 0:
            for one in files.usable(settings.path, self._world, skipped, avoid=self._damaged):
                if one.block:
                    skipped.append(f"{one.name} is of block {one.block}: a run is resumed in its first block only")
                elif settings.resume or one.run == self._run:
                    own = one.name
                    break
        for line in skipped:
            log.warning("%s", line)
        return recovery.gather(own.encode().ljust(_WORD, b"\0"))[0].strip(b"\0").decode()

    def _held(self) -> Holding:
        if self._holding is None:
            raise InstepError("state_replica: checkpoints are loaded inside a job")
        return self._holding
