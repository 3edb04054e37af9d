"""Private state of a Megatron rank beside torch's: generators of the tracker, loss scales, the batch size, the rerun machine.

All of it changes before the commit's barrier, so it is kept in the rank's own record. Each class offers ``state_dict`` and
``load_state_dict`` of what ``instep.codec`` knows, and looks its object up when it is asked: scripts may make them anew.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from instep_state_replica.megatron.foreign import Scaler

_REQUESTS = ("rerun_requested", "checkpoint_requested", "restart_again_requested", "continue_requested")
_RERUN = ("current_iteration", "first_iteration_complete", *_REQUESTS, "suspicious_node", "suspicious_device")
_BATCH = ("num_micro_batches", "current_global_batch_size", "current_running_global_batch_size")


class Generators:
    """The states of tensor parallel and expert dropout, in Megatron's tracker."""

    def state_dict(self) -> dict[str, object]:
        """The state of each generator, as bytes in a tensor."""
        return {key: s.get_state() if isinstance(s, torch.Generator) else s for key, s in _tracker().get_states().items()}  # type: ignore[attr-defined]

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Generators stay the same objects; an interrupted fork() may have left another one current."""
        tracker = _tracker()
        new: dict[str, object] = {}
        live: Mapping[str, object] = tracker.get_states()  # type: ignore[attr-defined]
        for key, value in state.items():
            generator = live.get(key)
            if isinstance(generator, torch.Generator) and isinstance(value, Tensor):
                generator.set_state(value)
                new[key] = generator
            else:
                new[key] = value
        tracker.set_states(new)  # type: ignore[attr-defined]
        if hasattr(tracker, "_current_state_name"):
            tracker._current_state_name = "default-rng"


class Scales:
    """The loss scales; they follow overflows found before the update, in skipped steps too."""

    def __init__(self, scalers: Sequence[Scaler]) -> None:
        self._scalers = list(scalers)

    def state_dict(self) -> dict[str, object]:
        """By number of the optimizer."""
        return {str(i): scaler.state_dict() for i, scaler in enumerate(self._scalers)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Through the scalers."""
        for i, scaler in enumerate(self._scalers):
            values = state[str(i)]
            assert isinstance(values, dict)
            scaler.load_state_dict(values)


class Microbatches:
    """Megatron's global calculator, which a ramp of the batch size moves: call ``update_num_microbatches`` at the top of the loop."""

    def state_dict(self) -> dict[str, object]:
        """Nothing as long as there is no calculator."""
        from megatron.core import num_microbatches_calculator as module

        return {key: getattr(module._GLOBAL_NUM_MICROBATCHES_CALCULATOR, key, None) for key in _BATCH}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Set its numbers."""
        from megatron.core import num_microbatches_calculator as module

        calculator = module._GLOBAL_NUM_MICROBATCHES_CALCULATOR
        if calculator is not None:
            for key, value in state.items():
                setattr(calculator, key, value)


class Rerun:
    """The rerun machine's position between steps; what it keeps within one is made again when the step is."""

    def state_dict(self) -> dict[str, object]:
        """Plain values, empty without a machine."""
        machine = _machine()
        if machine is None:
            return {}
        plain = {key: getattr(machine, key, None) for key in _RERUN}
        tables = {"large_value_counts": dict(machine.large_value_counts), "max_values": dict(machine.max_values)}  # type: ignore[attr-defined]
        return {**plain, **tables, "mode": machine.mode.value, "state": machine.state.value}  # type: ignore[attr-defined]

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Set them, whatever the mode: its own ``load_state_dict`` is for checkpoints that ask for a rerun."""
        if not state:
            return
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        machine = get_rerun_state_machine()  # made when it is first asked for, which a replacement may not have done yet
        for key, value in state.items():
            kind = type(getattr(machine, key)) if key in ("mode", "state") else None
            setattr(machine, key, kind(value) if kind else value)


def _tracker() -> object:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def _machine() -> object | None:
    from megatron.core import rerun_state_machine

    machine: object | None = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    return machine
