"""The job of the Megatron tests: trains, and prints digests of all that a run with faults must share with one without."""

import random
import time
from typing import Any

import mcore_gpt
import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_current_global_batch_size, update_num_microbatches
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine, initialize_rerun_state_machine
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

import instep
from instep.testing.finals import digest, tell
from instep_state_replica.megatron import Megatron


def final(training: mcore_gpt.Training, counters: dict[str, int]) -> dict[str, object]:
    """Every parameter, every optimizer tensor, generators, schedule: by digest."""
    parts = [part for part in training.optimizer.chained_optimizers if not part.is_stub_optimizer]
    groups = [[{k: v for k, v in g.items() if k != "params"} for g in part.optimizer.param_groups] for part in parts]
    parameters = [p for part in parts for g in part.optimizer.param_groups for p in g["params"]]
    moments = [part.optimizer.state[p] for part in parts for g in part.optimizer.param_groups for p in g["params"]]
    scalers = [part.grad_scaler.state_dict() for part in parts if getattr(part, "grad_scaler", None)]
    return {
        "parameters": digest([list(chunk.parameters()) for chunk in training.chunks]),
        "buffers": digest([dict(chunk.named_buffers()) for chunk in training.chunks]),
        "main": digest(parameters),
        "moments": digest(moments),
        "groups": digest(groups),
        "schedule": training.scheduler.num_steps,
        "scale": digest(scalers),
        "torch": digest(torch.get_rng_state()),
        "python": digest(random.getstate()),
        "tracker": digest(get_cuda_rng_tracker().get_states()),
        "batch": get_current_global_batch_size(),
        "process groups": len(dist.distributed_c10d._world.pg_map),
        "iteration": get_rerun_state_machine().current_iteration,
        **counters,
    }


def be_late(session: Any, step: int) -> None:
    """Do not see the end of the barrier of ``step``: a rank that was not scheduled while the others went on."""
    local = session._engine.local
    wait = local.barrier.wait

    def late(seconds: float) -> bool:
        if session.step != step or local.board.current > 0:
            return bool(wait(seconds))
        time.sleep(seconds)
        if local.board.revoked:
            print(f"cut in the barrier of step {step}", flush=True)
        return False

    local.barrier.wait = late


def main() -> None:
    args = mcore_gpt.options()
    torch.set_num_threads(1)
    session = instep.init()
    if args.late and args.late.startswith(f"{session.rank}@"):
        be_late(session, int(args.late.partition("@")[2]))
    if args.rerun:
        initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    training = mcore_gpt.Training(args, session.rank)
    counters = {"consumed": 0, "skipped": 0}
    session.protect(training=Megatron(training.chunks, training.optimizer, training.scheduler), counters=counters)

    @session.recoverable
    def train() -> int:
        while session.step < args.steps:
            if session.step % 2 == 0:  # now and then: between two calls its state has to come back
                update_num_microbatches(counters["consumed"])
            batch, machine = get_current_global_batch_size(), get_rerun_state_machine()
            while machine.should_run_forward_backward(None):
                training.gradients(counters["consumed"])
            with session.commit():
                updated, _norm, _zeros = training.optimizer.step()
                if updated:
                    training.scheduler.step(increment=batch)
                counters["skipped"] += not updated
                counters["consumed"] += batch
        return session.step

    train()
    training.gathered()
    tell(final(training, counters))


if __name__ == "__main__":
    main()
