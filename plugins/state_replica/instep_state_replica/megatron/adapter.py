"""The adapter of megatron-core: what ``session.protect`` is given in place of model, optimizer and scheduler.

Parameters in the buckets of the distributed optimizer never travel: a replacement is given its optimizer shard by a twin in another
instance, and every recovery hands parameters out as each step does, by a gather. Everything else is sent by a replica.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from instep.errors import UsageError
from instep.torch.adapter import Port, ShardGroup
from instep.torch.private import Stateful
from instep_state_replica.megatron import layout, supported
from instep_state_replica.megatron.foreign import Chunk, MegatronOptimizer, distributed, parts
from instep_state_replica.megatron.forget import forget
from instep_state_replica.megatron.private import Generators, Microbatches, Rerun, Scales
from instep_state_replica.megatron.splitting import SplitStep


class Megatron:
    """Megatron's model chunks, optimizer and scheduler, protected together.

    ``chunks`` are wrapped in Megatron's DistributedDataParallel, ``optimizer`` is what ``get_megatron_optimizer`` returned,
    ``scheduler`` Megatron's or any object with ``state_dict``. ``optimizer.step()`` stands in ``with session.commit()``, once; the step
    of the scheduler behind it. ``name`` tells several adapters of a job apart.

    Raises:
        UsageError: something about them, or the version of megatron-core, cannot be recovered; the message says what to use instead.
    """

    def __init__(
        self, chunks: Sequence[Chunk] | Chunk, optimizer: MegatronOptimizer, scheduler: object | None = None, *, name: str = "megatron"
    ) -> None:
        self._chunks: list[Chunk] = [chunks] if isinstance(chunks, nn.Module) else list(chunks)  # type: ignore[list-item, arg-type]
        if not self._chunks:
            raise UsageError("Megatron([]): there is no model chunk to protect")
        supported.check(self._chunks, optimizer)
        self._optimizer, self._scheduler, self._name = optimizer, scheduler, name
        self._rank, self._world_size = 0, 1

    def attach(self, port: Port, *, rank: int, world_size: int) -> None:
        """See ``instep.torch.adapter.Adapter``, as for all methods."""
        self._rank, self._world_size = rank, world_size
        SplitStep(self._chunks, self._optimizer, port)

    def groups(self) -> Sequence[ShardGroup]:
        """Dense and expert parameters, dense and expert optimizer, the schedule: those of them that this job has."""
        return layout.groups(self._name, self._chunks, self._optimizer, self._scheduler, rank=self._rank, world_size=self._world_size)

    def modules(self) -> Mapping[str, nn.Module]:
        """The chunks."""
        return {str(i): chunk.module for i, chunk in enumerate(self._chunks)}

    def private(self) -> Mapping[str, Stateful]:
        """Generators, loss scales, batch size, rerun machine."""
        scalers = [scaler for part in parts(self._optimizer) if (scaler := getattr(part, "grad_scaler", None)) is not None]
        out: dict[str, Stateful] = {"generators": Generators(), "microbatches": Microbatches(), "rerun": Rerun()}
        return {**out, "scales": Scales(scalers)} if scalers else out

    @torch.no_grad()
    def publish(self) -> None:
        """Parameters from main parameters, on this rank and then on all."""
        owners = [part for part in parts(self._optimizer) if distributed(part)]
        for part in owners:
            part._copy_main_params_to_model_params()
        if owners:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)

    def reset(self) -> None:
        """Gradients, handles, marks."""
        forget(self._chunks, self._optimizer)
