from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_world import Group, Scenario, Trainer, digests, exchange, net
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.join import _JoinConfig
from torch.nn.parallel import DistributedDataParallel

from instep.errors import UsageError
from instep.torch.shared import Shared


def wrap(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net(), process_group=Group(None), **options)


def built_in_hook() -> DistributedDataParallel:
    model = wrap()
    model._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
    return model


def compiled_in_place() -> DistributedDataParallel:
    model = wrap()
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: wrap(static_graph=True), "static_graph=True"),
        (built_in_hook, "communication hook"),
        (lambda: torch.compile(wrap(), backend="eager"), r"DistributedDataParallel\(torch.compile\(model\)\)"),
        (compiled_in_place, "compile the inner module"),
        (lambda: nn.ModuleList([wrap(static_graph=True)]), r"\.0: static_graph"),
    ],
)
def test_what_cannot_be_set_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(UsageError, match=f"^model.*{says}"):
        Shared().add("model", make())


def test_a_hook_registered_after_protect_is_refused_at_the_block() -> None:
    state, model = Shared(), wrap()
    state.add("model", model)
    model._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
    with pytest.raises(UsageError, match="communication hook"):
        state.check_coverage()


def test_the_census_finds_a_ddp_whose_module_alone_is_protected() -> None:
    state = Shared()
    state.census.start()
    inner = net()
    model = DistributedDataParallel(inner, process_group=Group(None))
    state.add("model", inner)
    state.check_coverage()
    assert [reducer.ddp for reducer in state._reducers] == [model]
    assert DistributedDataParallel(net(), process_group=Group(None)) not in state.census.living()


def test_a_ddp_that_nothing_protects_is_named() -> None:
    state = Shared()
    state.census.start()
    model = wrap()
    state.add("model", nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"number 0: parameter '0.weight' of a DistributedDataParallel is not protected"):
        state.check_coverage()
    del model


def test_join_is_seen() -> None:
    trainer = Trainer(Group(None))
    assert not trainer.shared.joining()
    # What ``with trainer.ddp.join()`` sets; the context itself wants a default group.
    trainer.ddp._join_config = _JoinConfig(enable=True, throw_on_early_termination=False, is_first_joinable=True)
    assert trainer.shared.joining()


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_a_layout_reaches_a_reducer_without_history(options: dict[str, bool]) -> None:
    donor, fresh = Trainer(Group(None), **options), Trainer(Group(None), **options)
    first = fresh.buckets()
    donor.run(2)
    schema, _ = donor.shared.world.describe()
    for trainer in (donor, fresh):
        trainer.shared.world.align(schema)
        assert trainer.buckets() == donor.buckets() != first
        trainer.group.asked.clear()
        trainer.run(2)
        # One all-reduce for each bucket and step, and the buffers of each forward; no rebuilding.
        assert trainer.group.asked.count("allreduce") == 2 * len(donor.buckets())
        assert trainer.buckets() == donor.buckets()


@pytest.mark.parametrize(
    ("steps", "backwards", "rebuilt"),
    [(0, 0, False), (0, 1, False), (0, 2, False), (1, 0, True), (1, 1, True), (2, 0, True)],
)
def test_the_layout_is_the_one_of_the_last_commit(steps: int, backwards: int, rebuilt: bool) -> None:
    """Rebuilding happens at the second forward with gradients, also in mid-step; the step runs again with what it began with."""
    trainer, other = Trainer(Group(None)), Trainer(Group(None))
    first = trainer.buckets()
    other.run(1)
    trainer.run(steps)
    trainer.backwards(backwards)
    schema, _ = trainer.shared.world.describe()
    for each in (trainer, other):
        each.optimizer.zero_grad()
        each.shared.world.align(schema)
        assert (each.buckets() == first) is not rebuilt
        each.backwards(2)
        assert each.buckets() != first


def test_a_first_commit_cut_in_its_barrier_is_seen_when_it_comes_again() -> None:
    trainer = Trainer(Group(None))
    first = trainer.buckets()
    trainer.backwards(1)
    trainer.shared.prepare()
    schema, _ = trainer.shared.world.describe()
    trainer.optimizer.zero_grad()
    trainer.shared.world.align(schema)
    assert trainer.buckets() == first
    trainer.run(1)
    layout, _ = trainer.shared._reducers[0].describe()
    assert layout is not None


def test_steps_without_reduction_leave_the_first_layout() -> None:
    trainer = Trainer(Group(None))
    with trainer.ddp.no_sync():
        trainer.run(2)
    assert trainer.shared.world.describe()[0]
    assert trainer.shared._reducers[0].describe() == [None, False]
    trainer.backwards(2)
    assert trainer.shared._reducers[0].describe() == [None, False]


def test_unused_parameters_are_never_rebuilt() -> None:
    trainer = Trainer(Group(None), find_unused_parameters=True)
    trainer.run(2)
    before = trainer.buckets()
    schema, _ = trainer.shared.world.describe()
    trainer.backwards(0)
    trainer.shared.world.align(schema)
    assert trainer.buckets() == before
    trainer.run(1)


def test_a_backward_cut_in_the_middle_is_forgotten() -> None:
    trainer = Trainer(Group(None))
    trainer.run(2)
    schema, _ = trainer.shared.world.describe()

    def cut(grad: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    handle = next(iter(trainer.ddp.module.children())).weight.register_hook(cut)
    with pytest.raises(KeyboardInterrupt):
        trainer.backwards(1)
    handle.remove()
    trainer.ddp.require_backward_grad_sync = False
    trainer.optimizer.zero_grad()
    trainer.shared.world.align(schema)
    trainer.run(2)
    assert trainer.step == 4


def test_a_layout_of_another_model_is_refused() -> None:
    trainer = Trainer(Group(None))
    for layout in ([[[0, 1]], True], [[[0, 0]], True], [None], "nonsense", [None, 3]):
        with pytest.raises(UsageError, match="do not fit this rank's 20 parameters"):
            trainer.shared._reducers[0].apply(layout)


def replace(lost: int, donor: int, at: int, backwards: int, trainer: Trainer, folder: Path) -> Trainer:
    """Go to step ``at`` and ``backwards`` further, cut it off, give ``lost`` a new life, and be back at the start of the step."""
    trainer.run(at)
    private = [buffer.clone() for buffer in trainer.ddp.buffers()]
    trainer.backwards(backwards)
    trainer.optimizer.zero_grad()
    if trainer.group.rank() == lost:
        trainer = Trainer(trainer.group, micro=trainer.micro, fresh=True, gradient_as_bucket_view=trainer.ddp.gradient_as_bucket_view)
        trainer.step = at
    exchange(trainer, folder, donor=donor, lost=lost)
    for buffer, value in zip(trainer.ddp.buffers(), private, strict=True):
        buffer.copy_(value)
    return trainer


# Who is lost, who donates, after how many steps, and after how many backwards of the next.
CUTS = ((0, 1, 3, 0), (2, 0, 1, 0), (1, 2, 0, 0), (0, 2, 0, 2), (1, 0, 1, 1))


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"micro": 2}], ids=str)
def test_three_ranks_go_on_bit_for_bit(options: dict[str, int], tmp_path: Path) -> None:
    scenarios: list[Scenario | None] = [None, *(partial(replace, *cut) for cut in CUTS)]
    clean, *faulty = digests(tmp_path, scenarios, **options)
    assert [cut for cut, row in zip(CUTS, faulty, strict=True) if row != clean] == []
