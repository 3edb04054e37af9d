"""Injections fire once, where and when they were placed."""

import pytest
import torch
from torch import nn

from instep.injection import InjectedFault, Injections
from instep.messages import Fired, Injection


def placed(point: str, *, told: list[Fired], step: int | None = 2, rank: int = 0, birth: int | None = None) -> Injections:
    injection = Injection(id=7, rank=rank, kind="raise", step=step, point=point, birth=birth)
    return Injections([injection], 0, 0, told.append)


def test_it_fires_once_and_tells_before() -> None:
    told: list[Fired] = []
    injections = placed("record", told=told)
    injections.at("record", 1)
    injections.at("prepared", 2)
    with pytest.raises(InjectedFault, match="'record' of step 2"):
        injections.at("record", 2)
    assert [fired.id for fired in told] == [7]
    injections.at("record", 2)
    assert not injections


@pytest.mark.parametrize(("rank", "birth", "concerned"), [(0, None, True), (0, 0, True), (0, 1, False), (1, None, False)])
def test_only_its_rank_and_birth_are_concerned(rank: int, birth: int | None, concerned: bool) -> None:
    assert bool(placed("step", told=[], rank=rank, birth=birth)) is concerned


def test_any_step_and_the_first_of_two_places() -> None:
    injections = placed("forward|record", told=[], step=None)
    assert injections.wants("forward")
    injections.at("step", 5)
    with pytest.raises(InjectedFault, match="'record' of step 5"):
        injections.at("record", 5)


@pytest.mark.parametrize("point", ["forward", "backward", "amid"])
def test_places_inside_model_and_optimizer(point: str) -> None:
    """At ``amid`` the first parameter group is updated and the second is not; nothing stays installed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])
    groups, now = optimizer.param_groups, 0
    injections = placed(point, told=[])
    remove = injections.install(lambda: now)

    def step() -> None:
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    now = 2
    before = [p.detach().clone() for p in parameters]
    with pytest.raises(InjectedFault, match=point):
        step()
    same = [torch.equal(one, other) for one, other in zip(before, parameters, strict=True)]
    assert same == ([False, False, True, True] if point == "amid" else [True] * 4)
    assert optimizer.param_groups is groups
    remove()
    step()


def test_outside_a_block_collectives_do_not_count() -> None:
    now: int | None = None
    injections = placed("collective", told=[], step=None)
    injections.install(lambda: now)
    injections.at("collective", 0)
    now = 0
    with pytest.raises(InjectedFault):
        injections.at("collective", 0)


def test_collectives_are_numbered_from_the_start_of_a_step() -> None:
    """``#2`` is the second one issued; a block that starts again counts anew, and a look ahead fires nothing."""
    injections = placed("issue#2|complete#3", told=[])
    for point in ("step", "issue", "complete", "step", "issue", "complete"):
        injections.at(point, 2)
    assert not injections.expects("complete", 2)
    with pytest.raises(InjectedFault, match="'issue' of step 2"):
        injections.at("issue", 2)

    injections = placed("complete#2", told=[])
    injections.at("issue", 2)
    injections.at("issue", 2)
    assert injections.expects("complete", 2)
    assert not injections.expects("complete", 3)
    with pytest.raises(InjectedFault, match="'complete' of step 2"):
        injections.at("complete", 2)
