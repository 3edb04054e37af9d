"""Modules of ``fully_shard`` in one process over real gloo: what is refused, what a cut in torch's own code leaves, switches, layouts."""

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from instep.errors import UsageError
from instep.torch import fsdp
from instep.torch.sharding import name
from instep.torch.share import Share
from instep.torch.shared import Shared


@pytest.fixture(autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    dist.destroy_process_group()


def model(mesh: DeviceMesh) -> Any:
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    for layer in (made[0], made[1]):
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    return made


def group(module: nn.Module) -> Any:
    assert isinstance(module, FSDPModule)
    return module._get_fsdp_state()._fsdp_param_groups[0]


def test_the_first_fsdp_is_refused_by_name() -> None:
    wrapped = FullyShardedDataParallel(nn.Linear(3, 4), device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.NO_SHARD)

    with pytest.raises(UsageError, match=r"model\.0: FullyShardedDataParallel .* use torch\.distributed\.fsdp\.fully_shard"):
        Shared().add("model", nn.Sequential(wrapped))


def test_a_partial_sum_is_refused_by_name(mesh: DeviceMesh) -> None:
    shared = Shared()
    shared.add("total", DTensor.from_local(torch.zeros(2), mesh, (Replicate(), Partial())))

    with pytest.raises(UsageError, match=r"total: a DTensor of shape \(2,\).* is a sum that nobody has added up"):
        shared.check_coverage()


def test_preparations_that_were_cut_are_done_again(mesh: DeviceMesh) -> None:
    """A signal may land in the first forward pass, in which torch makes up its mind who is the root."""
    whole, cut = model(mesh), model(mesh)
    state = cut._get_fsdp_state()

    def interrupted(self: object) -> None:
        raise KeyboardInterrupt

    state._init_shared_state = types.MethodType(interrupted, state)
    with pytest.raises(KeyboardInterrupt):
        cut(torch.ones(1, 3))
    del state._init_shared_state
    fsdp.reset(cut)

    assert torch.equal(cut(torch.ones(1, 3)), whole(torch.ones(1, 3)))
    fsdp.reset(cut)
    assert all(isinstance(p, DTensor) for p in cut.parameters())


def test_parameters_that_were_half_gathered_are_shards_again(mesh: DeviceMesh) -> None:
    made = model(mesh)
    made(torch.ones(1, 3)).sum().backward()
    made[0].unshard()
    group(made[0])._sharded_state = ShardedState.SHARDED
    assert not isinstance(made[0].weight, DTensor)

    fsdp.reset(made)

    assert isinstance(made[0].weight, DTensor)


def test_gradients_of_a_micro_batch_that_was_cut_are_gone(mesh: DeviceMesh) -> None:
    whole, cut = model(mesh), model(mesh)
    cut.set_requires_gradient_sync(False)
    cut(torch.full((1, 3), 7.0)).sum().backward()
    cut.set_requires_gradient_sync(True)
    fsdp.reset(cut)
    for each in (whole, cut):
        each(torch.ones(1, 3)).sum().backward()

    for ours, theirs in zip(whole.parameters(), cut.parameters(), strict=True):
        assert torch.equal(_local(ours.grad), _local(theirs.grad))


def test_switches_are_set_back(mesh: DeviceMesh) -> None:
    """Also on a replacement, which has not run forward yet, while the one that recorded them had."""
    made, fresh = model(mesh), model(mesh)
    made(torch.ones(1, 3)).sum().backward()
    made[1].set_reshard_after_forward(False)
    made.set_requires_all_reduce(False)
    recorded = fsdp.Switches(made).state_dict()
    before = [_switched(layer) for layer in (made[0], made[1], made)]

    made.set_requires_gradient_sync(False)
    made.set_is_last_backward(False)
    made.set_reshard_after_backward(False)
    made.set_reshard_after_forward(True)
    fsdp.Switches(made).load_state_dict(recorded)
    assert [_switched(layer) for layer in (made[0], made[1], made)] == before

    fsdp.Switches(fresh).load_state_dict(recorded)
    fresh(torch.ones(1, 3))
    assert [_switched(layer) for layer in (fresh[0], fresh[1], fresh)] == before
    assert not fsdp.Switches(nn.Linear(1, 1))


def test_parameters_that_evaluation_left_gathered_are_told_as_shards(mesh: DeviceMesh) -> None:
    made = nn.Sequential(nn.Linear(3, 4))
    fully_shard(made, mesh=mesh)
    optimizer, shared = torch.optim.SGD(made.parameters()), Shared()
    shared.add("model", made)
    shared.add("optimizer", optimizer)
    with torch.no_grad():
        made(torch.ones(1, 3))
    assert not isinstance(made[0].weight, DTensor)

    shared.check_coverage()

    assert [share.name for share in shared.shares()] == ["replica", "shards@0"]
    assert "model.0.weight" in shared.shares()[1].digests()


class Rows(torch.optim.Optimizer):
    """Keeps a sum for each row: state of another shape than its parameter, one sharded as it is, one whole on each rank."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["alike"] = DTensor.from_local(torch.arange(float(len(p))), p.device_mesh, p.placements)
            state["whole"] = DTensor.from_local(torch.ones(2), p.device_mesh, (Replicate(), Replicate()))
            state["count"] = torch.tensor(3.0)


def sharded(mesh: DeviceMesh) -> tuple[Shared, torch.optim.Optimizer, Tensor]:
    layer = nn.Linear(3, 4, bias=False)
    fully_shard(layer, mesh=mesh)
    optimizer, shared = Rows(layer.parameters(), {}), Shared()
    shared.add("model", layer)
    shared.add("optimizer", optimizer)
    shared.check_coverage()
    return shared, optimizer, layer.weight


def test_state_keeps_its_own_shape_and_placements(mesh: DeviceMesh) -> None:
    (theirs, donor, _), (ours, optimizer, parameter) = sharded(mesh), sharded(mesh)
    donor.step()
    give, take = theirs.shares()[1], ours.shares()[1]

    _hand_over(give, take)

    state = optimizer.state[parameter]
    assert list(state) == ["alike", "whole", "count"]
    assert (tuple(state["alike"].shape), state["alike"].placements) == ((4,), (Replicate(), Shard(0)))
    assert (tuple(state["whole"].shape), state["whole"].placements) == ((2,), (Replicate(), Replicate()))
    assert take.digest() == give.digest()


def test_state_that_lies_otherwise_is_refused_by_name(mesh: DeviceMesh) -> None:
    shared, optimizer, parameter = sharded(mesh)
    optimizer.state[parameter]["odd"] = DTensor.from_local(torch.zeros(4, 3), mesh, (Replicate(), Shard(1)))

    with pytest.raises(UsageError, match=r"model\.weight: the optimizer keeps 'odd' with placements"):
        shared.shares()[1].examine()


def test_groups_of_two_meshes_have_two_names() -> None:
    assert name((0, 2)) != name((0, 4))
    assert name(tuple(range(9))) != name((*range(8), 9))
    assert len(name(tuple(range(4096)))) < 50


class Looked(nn.Module):
    """Counts how often somebody goes through its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.zeros(5), requires_grad=False)
        self.looks = 0

    def named_parameters(self, *args: object, **kwargs: object) -> Iterator[tuple[str, nn.Parameter]]:
        self.looks += 1
        yield from super().named_parameters(*args, **kwargs)  # type: ignore[arg-type]


def test_a_step_looks_at_no_parameter() -> None:
    """Frozen or not: what they cost is paid in a recovery, and once behind the first commit."""
    shared, module = Shared(), Looked()
    shared.add("model", module)
    shared.check_coverage()
    shared.prepare()
    shared.commit()
    before = module.looks

    for _ in range(3):
        shared.prepare()
        shared.commit()

    assert module.looks == before > 0


def _hand_over(give: Share, take: Share) -> None:
    schema, tensors = give.describe()
    for source, target in zip(tensors, take.destination(schema, staged=False), strict=True):
        target.copy_(source)
    take.accept()


def _local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def _switched(layer: Any) -> tuple[bool, bool, bool, bool, bool]:
    state, it = layer._get_fsdp_state(), group(layer)
    forward = it.post_forward_mesh_info is not None
    return it.reduce_grads, it.all_reduce_grads, it.reshard_after_backward, state._state_ctx.is_last_backward, forward


def test_the_tree_is_the_same_object_until_it_consists_of_other_tensors(mesh: DeviceMesh) -> None:
    module = model(mesh)
    optimizer = torch.optim.AdamW(module.parameters())
    shared = Shared()
    shared.add("model", module)
    shared.add("optimizer", optimizer)
    shared.check_coverage()
    shards = shared.shares()[1]

    def step() -> object:
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return shards.present()[0]

    before, first = shards.present()[0], step()
    weight = next(module.parameters())
    state: dict[str, Any] = optimizer.state[weight]

    assert first is not before
    assert step() is first

    state["exp_avg"] = state["exp_avg"].clone()
    second = step()
    assert second is not first
    weight._local_tensor.data = weight._local_tensor.clone()
    third = step()
    assert third is not second
    state["calls"] = 1.5
    fourth = step()
    assert fourth is not third
    state["calls"] += 1.0
    fifth = step()
    assert fifth is not fourth
    assert step() is fifth
    state["seen"] = [1]
    assert step() is not step()
