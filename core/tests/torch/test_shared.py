import copy
from collections import Counter, deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from instep.errors import InstepError, UsageError
from instep.torch.shared import Shared

Parts = dict[str, object]


def pass_on(donor: Shared, receiver: Shared, *, staged: bool = False) -> int:
    """What a plugin does, without sockets."""
    schema, tensors = donor.world.describe()
    places = receiver.world.destination(schema, staged=staged)
    assert [(t.dtype, t.shape) for t in tensors] == [(t.dtype, t.shape) for t in places]
    assert all(t.is_contiguous() for t in [*tensors, *places])
    for source, place in zip(tensors, places, strict=True):
        place.copy_(source)
    receiver.world.accept()
    receiver.world.align(schema)
    return len(tensors)


def shared(**parts: object) -> Shared:
    out = Shared()
    for name, part in parts.items():
        out.add(name, part)
    out.check_coverage()
    return out


def net(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *after: Callable[[], object]) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).to(dtype)

        def closure(x: Tensor = x) -> float:
            optimizer.zero_grad()
            loss: Tensor = model(x).float().pow(2).mean()
            loss.backward()
            return loss.item()

        optimizer.step(closure)
        for call in after:
            call()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 1e-4}], lr=3e-3)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), amsgrad=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3, history_size=4),
}


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("steps", [(3, 0), (3, 1), (0, 2), (0, 0)])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_goes_on_as_the_donor(
    make: Callable[[nn.Module], torch.optim.Optimizer], steps: tuple[int, int], staged: bool
) -> None:
    a, b = net(seed=1), net(seed=2 if steps[1] else 1)
    opt_a, opt_b = make(a), make(b)
    train(a, opt_a, steps[0])
    train(b, opt_b, steps[1])
    donor, receiver = shared(model=a, optimizer=opt_a), shared(model=b, optimizer=opt_b)
    groups = [id(group) for group in opt_b.param_groups]
    pass_on(donor, receiver, staged=staged)
    assert receiver.world.digest() == donor.world.digest()
    assert receiver.digests() == donor.digests()
    assert groups == [id(group) for group in opt_b.param_groups]
    for buffer, source in zip(b.buffers(), a.buffers(), strict=True):
        buffer.copy_(source)
    train(a, opt_a, 2)
    train(b, opt_b, 2)
    assert receiver.world.digest() == donor.world.digest()


def test_own_tensors_are_received_into_unless_staged() -> None:
    a, b = net(seed=1), net(seed=2)
    opt_a, opt_b = adamw(a), adamw(b)
    train(a, opt_a, 2)
    train(b, opt_b, 1)
    donor, receiver = shared(model=a, optimizer=opt_a), shared(model=b, optimizer=opt_b)
    schema, _ = donor.world.describe()
    own = {p.data_ptr() for p in b.parameters()} | {t.data_ptr() for s in opt_b.state.values() for t in s.values()}
    assert {t.data_ptr() for t in receiver.world.destination(schema, staged=False)} == own
    before = receiver.world.digest()
    for place in receiver.world.destination(schema, staged=True):
        assert place.data_ptr() not in own
        place.fill_(1)
    assert receiver.world.digest() == before


def test_optimizer_state_keeps_the_donors_dtype() -> None:
    a, b = net(seed=1, dtype=torch.bfloat16), net(seed=2, dtype=torch.bfloat16)
    opt_a, opt_b = adamw(a), adamw(b)
    train(a, opt_a, 1)
    first = next(a.parameters())
    opt_a.state[first]["exp_avg"] = opt_a.state[first]["exp_avg"].float() + 1e-6
    donor, receiver = shared(model=a, optimizer=opt_a), shared(model=b, optimizer=opt_b)
    pass_on(donor, receiver)
    assert opt_b.state[next(b.parameters())]["exp_avg"].dtype is torch.float32
    assert receiver.world.digest() == donor.world.digest()


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 5]),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "chain": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_goes_on_as_the_donors(make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]) -> None:
    a, b = net(seed=1), net(seed=1)
    opt_a, opt_b = adamw(a), adamw(b)
    sched_a, sched_b = make(opt_a), make(opt_b)
    train(a, opt_a, 4, sched_a.step)
    donor = shared(model=a, optimizer=opt_a, scheduler=sched_a)
    receiver = shared(model=b, optimizer=opt_b, scheduler=sched_b)
    pass_on(donor, receiver)
    assert receiver.world.digest() == donor.world.digest()
    for _ in range(3):
        for optimizer, schedule in ((opt_a, sched_a), (opt_b, sched_b)):
            optimizer.step()
            schedule.step()
        assert sched_b.get_last_lr() == sched_a.get_last_lr()
        assert [g["lr"] for g in opt_b.param_groups] == [g["lr"] for g in opt_a.param_groups]


def test_plateau_schedule_with_infinite_values() -> None:
    a, b = net(seed=1), net(seed=1)
    opt_a, opt_b = adamw(a), adamw(b)
    plateau_a, plateau_b = (torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1) for o in (opt_a, opt_b))
    for loss in (3.0, 2.0, 2.0, 2.0, 2.0):
        plateau_a.step(loss)
    donor, receiver = shared(model=a, optimizer=opt_a, plateau=plateau_a), shared(model=b, optimizer=opt_b, plateau=plateau_b)
    pass_on(donor, receiver)
    assert receiver.world.digest() == donor.world.digest()
    assert plateau_b.best == plateau_a.best


def test_scaler_before_and_after_its_scale_exists() -> None:
    for used_by_receiver in (False, True):
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
        model, optimizer = net(), torch.optim.SGD(net().parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for scaler, used in zip(scalers, (True, used_by_receiver), strict=True):
            for _ in range(3 if scaler is scalers[0] else 1):
                if used:
                    scaler.scale(model(torch.randn(6, 4)).sum()).backward()
                    scaler.step(optimizer)
                    scaler.update()
        donor, receiver = shared(scaler=scalers[0]), shared(scaler=scalers[1])
        pass_on(donor, receiver)
        assert scalers[1].get_scale() == scalers[0].get_scale() == 2048.0
        assert receiver.world.digest() == donor.world.digest()


def test_moving_average_with_an_adopted_counter() -> None:
    models = [net(seed=1), net(seed=1)]
    averages = [torch.optim.swa_utils.AveragedModel(m) for m in models]
    donor, receiver = (shared(model=m, ema=e) for m, e in zip(models, averages, strict=True))
    for _ in range(3):
        with torch.no_grad():
            next(models[0].parameters()).add_(1)
        averages[0].update_parameters(models[0])
    donor.adopt_buffer("ema.n_averaged", averages[0].n_averaged)
    pass_on(donor, receiver)
    assert int(averages[1].n_averaged) == 3
    assert list(receiver.adopted) == ["ema.n_averaged"]
    assert receiver.world.digest() == donor.world.digest()


def test_tied_and_twice_protected_tensors_are_sent_once() -> None:
    models = []
    for seed in (1, 2):
        model = net(seed=seed)
        model.append(nn.Linear(2, 2))
        model.append(nn.Linear(2, 2))
        model[5].weight = model[4].weight
        models.append(model)
    donor, receiver = (shared(model=m, again=m, head=m[4].weight, table={"w": m[4].weight}) for m in models)
    assert pass_on(donor, receiver) == len(list(models[0].parameters()))
    assert models[1][5].weight is models[1][4].weight
    assert receiver.world.digest() == donor.world.digest()


def test_tensors_of_every_kind() -> None:
    def make(fill: int) -> Parts:
        return {
            "half": torch.full((3, 2), fill, dtype=torch.bfloat16),
            "flags": torch.tensor([True, False, bool(fill)]),
            "scalar": torch.tensor(float(fill)),
            "empty": torch.empty(0, 3),
            "turned": torch.arange(6.0).add(fill).reshape(2, 3).t(),
            "strided": torch.arange(12.0).add(fill)[::2],
            "complex": torch.full((2,), fill + 1j, dtype=torch.complex64),
            "wide": torch.tensor(2**60 + fill),
        }

    for staged in (False, True):
        a, b = make(7), make(0)
        donor, receiver = shared(**a), shared(**b)
        pass_on(donor, receiver, staged=staged)
        for name, tensor in b.items():
            assert isinstance(tensor, Tensor)
            other = a[name]
            assert isinstance(other, Tensor)
            assert torch.equal(tensor, other), name
            assert tensor.stride() == other.stride()
        assert receiver.world.digest() == donor.world.digest()


def test_plain_containers_are_restored_in_place() -> None:
    def make() -> Parts:
        return {
            "table": {1: "one", (2, 3): [1.5]},
            "items": [1, 2],
            "recent": deque([1], maxlen=3),
            "counts": Counter("aab"),
            "names": {"x"},
        }

    a, b = make(), make()
    table, items, recent, counts, names = a.values()
    assert isinstance(table, dict)
    assert isinstance(items, list)
    assert isinstance(recent, deque)
    assert isinstance(counts, Counter)
    assert isinstance(names, set)
    table["best"] = {"loss": float("inf"), "weights": torch.arange(3.0)}
    del table[1]
    items[:] = [torch.ones(2), None]
    recent.extend([2, 3, 4])
    counts["b"] = 9
    names.add("y")
    donor, receiver = shared(**a), shared(**b)
    kept = dict(b)
    pass_on(donor, receiver)
    assert all(b[name] is kept[name] for name in b)
    assert receiver.world.digest() == donor.world.digest()
    assert b["counts"] == Counter({"b": 9, "a": 2})
    assert b["recent"] == deque([2, 3, 4], maxlen=3)


def test_one_own_tensor_does_not_serve_two_of_the_donor() -> None:
    tensor = torch.zeros(2)
    mine = {"best": tensor, "last": tensor}
    donor, receiver = shared(table={"best": torch.ones(2), "last": torch.full((2,), 2.0)}), shared(table=mine)
    pass_on(donor, receiver)
    assert mine["best"].tolist() == [1, 1]
    assert mine["last"].tolist() == [2, 2]


def test_digests_name_what_differs() -> None:
    a, b = net(seed=1), net(seed=1)
    opt_a, opt_b = adamw(a), adamw(b)
    train(a, opt_a, 1)
    train(b, opt_b, 1)
    opt_b.param_groups[1]["lr"] = 1.0
    opt_b.state[next(b.parameters())]["exp_avg"][0, 0] += 1
    one, other = shared(model=a, optimizer=opt_a).digests(), shared(model=b, optimizer=opt_b).digests()
    assert one.keys() == other.keys()
    assert {name for name in one if one[name] != other[name]} == {"optimizer.groups", "optimizer.state.0.exp_avg"}
    assert "model.0.weight" in one


class Own:
    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value, "deep": [{"a": self.value}]}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self.value = state_dict["value"]


def test_own_classes_and_what_they_may_not_hold() -> None:
    mine = Own(1)
    pass_on(shared(own=Own((1, 2))), shared(own=mine))
    assert mine.value == (1, 2)
    with pytest.raises(UsageError, match=r"own\['value'\].*object"):
        shared(own=Own(object()))


@pytest.mark.parametrize(
    ("thing", "says"),
    [
        (3, "keep it in a dict"),
        ((1, 2), "keep it in a dict"),
        (object(), r"state_dict\(\)"),
        (lambda: 0, r"state_dict\(\)"),
        (Own, r"state_dict\(\)"),
    ],
)
def test_things_without_state_are_refused(thing: object, says: str) -> None:
    with pytest.raises(UsageError, match=f"^thing: .*{says}"):
        shared(thing=thing)


def test_state_that_turns_out_unknown_at_the_first_commit() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    state = shared(model=model, optimizer=optimizer)
    optimizer.state[next(model.parameters())]["odd"] = object()
    state.prepare()
    with pytest.raises(UsageError, match=r"optimizer\['state'\]\[0\]\['odd'\]"):
        state.commit()


def test_an_unprotected_parameter_is_named() -> None:
    model, other = net(), nn.Linear(3, 1)
    groups: list[dict[str, object]] = [{"params": list(model.parameters())}, {"params": [other.bias, other.weight]}]
    optimizer = torch.optim.SGD(groups)
    with pytest.raises(UsageError, match=r"optimizer: parameter 0 of group 1 \(shape \(1,\)\)"):
        shared(model=model, optimizer=optimizer)
    shared(model=model, optimizer=optimizer, weight=other.weight, bias=other.bias)


def test_differences_in_structure_are_named() -> None:
    model = net()
    schema, _ = shared(model=model, table={}).world.describe()
    wide = copy.deepcopy(model)
    wide[3] = nn.Linear(8, 3)
    for receiver, says in (
        (shared(model=model), "table: protected on the donor, but not on this rank"),
        (shared(model=model, table={}, more={}), "more: protected on this rank, but not on the donor"),
        (shared(model=wide, table={}), r"model.3.weight: torch.float32 of shape \(2, 8\) on the donor, .*\(3, 8\) on this rank"),
        (shared(model=copy.deepcopy(model).double(), table={}), r"model.0.weight: torch.float32 .* torch.float64"),
        (shared(model=model, table=[]), r"table: builtins.dict on the donor, builtins.list"),
    ):
        with pytest.raises(UsageError, match=says):
            receiver.world.destination(schema, staged=True)


def test_other_parameter_groups_are_refused_before_anything_changes() -> None:
    a, b = net(), net()
    receiver = shared(model=b, optimizer=torch.optim.SGD(b.parameters()))
    schema, _ = shared(model=a, optimizer=torch.optim.SGD([{"params": [p]} for p in a.parameters()])).world.describe()
    before = receiver.world.digest()
    with pytest.raises(
        UsageError, match=r"optimizer: the donor's parameter groups have \[1, 1, 1, 1, 1, 1\] parameters, this rank's have \[6\]"
    ):
        receiver.world.destination(schema, staged=False)
    assert receiver.world.digest() == before
    with pytest.raises(InstepError, match="nothing to accept"):
        receiver.world.accept()


def test_two_objects_under_one_name_are_refused() -> None:
    state = shared(table={})
    with pytest.raises(UsageError, match="table: two objects"):
        state.add("table", [])
