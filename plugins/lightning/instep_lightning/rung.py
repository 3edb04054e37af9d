"""The checkpoint rung: when no rank holds some state any more, the training goes on from what ModelCheckpoint saved, on all ranks.

It goes on as Lightning's own restart does (``trainer.fit(ckpt_path=...)`` in a new process): first everything stands as it did before the
first step, generators too, then Lightning's own code restores what is in the file.
"""

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from instep import codec
from instep.errors import NoCheckpoint
from instep.torch import rng
from instep_lightning import data, saved, sharded
from instep_lightning.adopt import inherited
from instep_lightning.flavour import Foreign, part
from instep_lightning.zipped import Unusable

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from instep.session import Session
    from instep.torch.effects import Effects
    from instep_lightning.record import Record
    from instep_lightning.undo import Undo

log = logging.getLogger(__name__)
_WORD = 2048
_MARK = "instep"
"""In a checkpoint, beside what Lightning saves."""


class Rung:
    """Loads checkpoints of one training. ``run`` tells its files from those of other runs in the same folder."""

    def __init__(self, trainer: "Trainer", session: "Session", effects: "Effects") -> None:
        self._trainer, self._session, self._effects = trainer, session, effects
        self._record: Record | None = None
        self._run = str(session.once(lambda: secrets.token_hex(8)))

    def ready(self, record: "Record", undo: "Undo", cursors: Sequence[object]) -> None:
        """Everything is as it stands before the first step, and ``cursors`` tell the loaders' positions before they began."""
        self._record, self._undo, self._cursors = record, undo, cursors
        self._start, self._generators = codec.encode(record.state_dict()), rng.capture()
        if saved.savers(self._trainer) and self._session._engine.state.loader is None:
            self._session.on_checkpoint(self.load)

    def mark(self, checkpoint: dict[str, Foreign]) -> None:
        """A checkpoint that is being saved tells where in which run that was."""
        if self._record is not None:
            checkpoint[_MARK] = {"run": self._run, "step": self._session.step, "effects": self._effects.position}

    def load(self, step: int | None) -> int:
        """See ``Session.on_checkpoint``. Rank 0 chooses for all. Raises ``NoCheckpoint``."""
        skipped: list[str] = []
        mine = self._own(skipped) if self._session.rank == 0 else iter(())
        while path := self._told(next(mine, "")):
            checkpoint, why = self._read(path, step)
            whys = [f"on rank {rank} {said}" if rank else said for rank, said in enumerate(self._gather(why)) if said]
            if not whys:
                return self._restore(path, checkpoint)
            skipped.append(f"{path} {whys[0]}")
            log.warning("checkpoint %s: going on without it", skipped[-1])
        raise NoCheckpoint(f"ModelCheckpoint has saved none in this run that can be loaded: {'; '.join(skipped) or 'nothing is there'}")

    def _own(self, skipped: list[str]) -> Iterator[str]:
        """Checkpoints of this run, newest first."""
        for path in saved.newest(self._trainer):
            try:
                if _mark(saved.peek(self._trainer, path)).get("run") == self._run:
                    yield path
            except Unusable as error:
                skipped.append(f"{path} {error}")
                log.warning("checkpoint %s: going on without it", skipped[-1])

    def _read(self, path: str, step: int | None) -> tuple[dict[str, Foreign], str]:
        try:
            saved.check(self._trainer, path, rank=self._session.rank, ranks=self._session.world_size)
            checkpoint = saved.read(self._trainer, path)
            found = _mark(checkpoint).get("step")
            if step not in (None, found):
                raise Unusable(f"is of step {found}, not {step}")
        except Unusable as error:
            return {}, str(error)
        return checkpoint, ""

    def _restore(self, path: str, checkpoint: dict[str, Foreign]) -> int:
        trainer: Foreign = self._trainer
        record, mark = self._record, _mark(checkpoint)
        assert record is not None
        trainer.training = True
        record.load_state_dict(codec.decode(self._start))  # type: ignore[arg-type]
        if type(trainer.strategy).__name__ == "ModelParallelStrategy":
            sharded.load(trainer, path, checkpoint)
        connector = trainer._checkpoint_connector
        migration = part(trainer, "utilities.migration.utils")
        connector._loaded_checkpoint = migration._pl_migrate_checkpoint(checkpoint, path)
        try:
            connector.restore_model()
            connector.restore_datamodule()
            connector.restore_callbacks()
            connector.restore_training_state()
        finally:
            connector._loaded_checkpoint = {}
        _begin(trainer.fit_loop)
        rng.restore(self._generators)
        data.again(trainer, self._cursors)
        self._undo.capture()
        step = int(mark["step"])
        self._effects.rewind(step, int(mark["effects"]))
        log.info("going on from %s at step %d", path, step)
        return step

    def _told(self, path: str) -> str:
        return self._gather(path)[0]

    def _gather(self, text: str) -> list[str]:
        rows = self._session._engine.local.comms.gather(text.encode()[:_WORD].ljust(_WORD, b"\0"))
        return [row.rstrip(b"\0").decode(errors="replace") for row in rows]


def _mark(checkpoint: Mapping[str, Foreign]) -> Mapping[str, Foreign]:
    """What the run that saved it has told."""
    told = checkpoint.get(_MARK)
    return told if isinstance(told, Mapping) else {}


def _begin(loop: Foreign) -> None:
    """What Lightning does to its counters before the first epoch."""
    inherited(loop).reset()
    if not loop._iteration_based_training():
        loop.epoch_progress.current.completed = loop.epoch_progress.current.processed
