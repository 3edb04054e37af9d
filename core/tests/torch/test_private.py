"""Private state: buffers, flags, cursors and objects, in one birth of a rank and in the next."""

import os
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn

from instep.agent import records
from instep.errors import InstepError, UsageError
from instep.torch import buffers as buffers_module
from instep.torch import rng
from instep.torch.private import Private


@pytest.fixture
def record() -> Iterator[int]:
    fd = records.create("test-private")
    yield fd
    os.close(fd)


class Holder(nn.Module):
    """Buffers of several kinds."""

    seen: Tensor
    hidden: Tensor
    previous: Tensor
    flags: Tensor
    mask: Tensor

    def __init__(self, *, mask: int = 0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.register_buffer("previous", torch.zeros(3))
        self.register_buffer("none", None)
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("flags", torch.zeros(5, dtype=torch.bool))
        if mask:
            self.register_buffer("mask", torch.zeros(mask))
        self.alias = self.norm


def present(tensor: Tensor | None) -> Tensor:
    """A running statistic, which batch norms that do not track any lack."""
    assert tensor is not None
    return tensor


class Notebook:
    """An object that each rank has for itself."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def state_dict(self) -> dict[str, object]:
        return {"lines": [*self.lines]}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        lines = state["lines"]
        assert isinstance(lines, list)
        self.lines = [*lines]


def private(fd: int, module: nn.Module | None = None, notebook: Notebook | None = None) -> Private:
    made = Private(fd)
    if module is not None:
        made.add_module("model", module)
    if notebook is not None:
        made.add_object("notebook", notebook)
    made.freeze()
    return made


def test_a_step_comes_back_in_the_same_birth(record: int) -> None:
    model, notebook = Holder(), Notebook()
    state = private(record, model, notebook)
    model.norm(torch.randn(8, 3))
    model.eval()
    notebook.lines.append("one")
    state.write(4)
    mean, draw = present(model.norm.running_mean).clone(), torch.rand(1)
    model.train()
    model.norm(torch.randn(8, 3))
    model.seen += 1
    model.flags[2] = True
    notebook.lines.append("two")
    state.write(5)
    state.load(4)
    assert torch.equal(present(model.norm.running_mean), mean)
    assert not model.norm.training
    assert model.seen == 0
    assert not model.flags.any()
    assert notebook.lines == ["one"]
    assert torch.equal(torch.rand(1), draw)
    state.load(5)
    assert model.seen == 1
    assert model.flags[2]
    assert notebook.lines == ["one", "two"]


def test_batch_norm_moves_without_a_version_and_is_recorded(record: int) -> None:
    model = nn.BatchNorm1d(3)
    state = private(record, model)
    state.write(0)
    before = present(model.running_mean)._version
    model(torch.randn(8, 3) + 5)
    moved = present(model.running_mean)
    assert moved._version == before, "torch counts versions of running statistics now; small buffers need no copy any more"
    mean = moved.clone()
    state.write(2)
    model(torch.randn(8, 3) - 5)
    state.load(2)
    assert torch.equal(present(model.running_mean), mean)


def test_the_next_birth_finds_every_step(record: int) -> None:
    first = Holder()
    state = private(record, first)
    for step in (0, 1):
        first.seen += 7
        first.norm(torch.randn(8, 3))
        state.write(step)
    second = Holder()
    successor = private(record, second)
    successor.load(0)
    assert second.seen == 7
    successor.load(1)
    assert second.seen == 14
    assert torch.equal(present(second.norm.running_var), present(first.norm.running_var))
    with pytest.raises(InstepError, match="step 2"):
        successor.load(2)


@pytest.mark.parametrize("sizes", [(10, 40000), (40000, 10)])
def test_the_next_birth_may_meet_its_objects_in_another_state(record: int, sizes: tuple[int, int]) -> None:
    """The room for a slot is reserved by what objects hold at the first block; a replacement may get there with more or less."""
    model, notebook = Holder(), Notebook()
    notebook.lines = ["x" * sizes[0]]
    state = private(record, model, notebook)
    model.seen += 3
    for step in (6, 7):
        state.write(step)
    other, other_notebook = Holder(), Notebook()
    other_notebook.lines = ["y" * sizes[1]]
    successor = private(record, other, other_notebook)
    for step in (6, 7):
        successor.load(step)
        assert other.seen == 3
        assert other_notebook.lines == ["x" * sizes[0]]


def test_another_layout_of_buffers_is_no_step_of_ours(record: int) -> None:
    private(record, Holder()).write(1)
    other = private(record, Holder(mask=9))
    with pytest.raises(InstepError, match="layout"):
        other.load(1)


def test_a_write_that_was_cut_keeps_the_step_before(record: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, notebook = Holder(), Notebook()
    state = private(record, model, notebook)
    for step in (1, 2):
        model.seen += 1
        state.write(step)

    def cut() -> dict[str, object]:
        raise RuntimeError("cut")

    monkeypatch.setattr(notebook, "state_dict", cut)
    model.seen += 1
    with pytest.raises(RuntimeError, match="cut"):
        state.write(3)
    other = Holder()
    successor = private(record, other, Notebook())
    with pytest.raises(InstepError):
        successor.load(3)
    successor.load(2)
    assert other.seen == 2


def test_a_reassigned_buffer_is_recorded_and_nothing_that_it_shared_is_written(record: int) -> None:
    """``self.previous = batch`` makes a buffer of a tensor that is somebody else's: going back must not write into that."""
    model = Holder()
    state = private(record, model)
    model.previous = torch.full((3,), 2.0)
    state.write(3)
    batch = torch.full((3,), 9.0)
    model.previous = batch
    state.load(3)
    assert model.previous.tolist() == [2, 2, 2]
    assert batch.tolist() == [9, 9, 9]


def test_two_buffers_that_change_places(record: int) -> None:
    model = Holder()
    state = private(record, model)
    model.previous, model.hidden = torch.full((3,), 1.0), torch.full((3,), 2.0)
    state.write(3)
    model.previous = model.hidden  # cut before the line that makes the new hidden state
    state.load(3)
    assert model.previous.tolist() == [1, 1, 1]
    assert model.hidden.tolist() == [2, 2, 2]


def test_large_buffers_are_copied_when_their_version_moves(record: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers_module, "_SMALL", 64)
    model = Holder(mask=100)
    state = private(record, model)
    for step in (0, 1):
        state.write(step)
    model.mask[3] = 1
    state.write(2)
    model.mask[4] = 1
    state.load(2)
    assert model.mask.nonzero().tolist() == [[3]]
    state.write(3)
    state.load(2)
    assert model.mask.nonzero().tolist() == [[3]]
    state.load(3)
    assert model.mask.nonzero().tolist() == [[3]]
    other = Holder(mask=100)
    private(record, other).load(3)
    assert other.mask.nonzero().tolist() == [[3]]


def test_a_copy_comes_back_into_large_buffers(record: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the slot held before counts no longer, though no version moved since then."""
    monkeypatch.setattr(buffers_module, "_SMALL", 64)
    model = Holder(mask=100)
    state = private(record, model)
    model.mask[3] = 1
    state.write(5)
    copy = state.capture(5)
    model.mask[4] = 1
    for step in (6, 7, 8):
        state.write(step)
    state.take(8, copy)
    state.load(8)
    assert model.mask.nonzero().tolist() == [[3]]


def test_what_stands_still_is_written_once(record: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that holds what is to be written is made valid for its new step, and only that."""
    state, join, joined = private(record), rng.join, []

    def counted(parts: rng.Parts) -> bytes:
        joined.append(1)
        return join(parts)

    monkeypatch.setattr(rng, "join", counted)
    for step in range(7):
        state.write(step)
    assert not joined
    wanted = torch.rand(3)
    state.write(7)
    assert len(joined) == 1
    torch.rand(3)
    private(record).load(6)
    assert torch.rand(3).equal(wanted)


def test_a_buffer_that_changes_in_a_body_is_shared_from_then_on(record: int) -> None:
    model = Holder()
    state = private(record, model)
    state.write(1)
    assert [*state.buffers.moved()] == []
    model.seen += 1
    moved = [*state.buffers.moved()]
    assert [name for name, _ in moved] == ["model.seen"]
    assert moved[0][1] is model.seen
    assert [*state.buffers.moved()] == []
    assert state.buffers.shared == ["model.seen"]
    state.load(1)
    assert model.seen == 1
    assert "buffer.model.seen" not in state.digests()


def test_a_buffer_that_is_replaced_in_a_body_is_refused(record: int) -> None:
    model = Holder()
    state = private(record, model)
    model.previous = torch.zeros(3)
    state.write(1)
    model.previous = 0.9 * model.previous + 1
    with pytest.raises(UsageError, match=r"model\.previous.*in place"):
        list(state.buffers.moved())


def test_sharing_what_other_ranks_found(record: int) -> None:
    model = Holder()
    state = private(record, model)
    state.write(0)
    shared = [*state.buffers.share({"model.seen", "model.unknown"})]
    assert [name for name, _ in shared] == ["model.seen"]
    assert [*state.buffers.share({"model.seen"})] == []
    model.seen += 5
    state.load(0)
    assert model.seen == 5


@pytest.mark.parametrize(("value", "says"), [(None, "became None"), (torch.zeros(4), "changed from"), (torch.zeros(3).double(), "float64")])
def test_a_buffer_of_another_shape_is_named(record: int, value: Tensor | None, says: str) -> None:
    model = Holder()
    state = private(record, model)
    model.previous = value  # type: ignore[assignment]
    with pytest.raises(UsageError, match=says):
        state.write(0)


def test_draws_are_seen(record: int) -> None:
    state = private(record)
    state.write(0)
    assert not state.drew()
    torch.rand(1)
    assert state.drew()
    state.write(1)
    for _ in range(40):
        assert not state.drew()
    torch.rand(1)
    assert state.drew()


def test_an_object_of_an_unknown_type_is_named_at_once(record: int) -> None:
    class Odd(Notebook):
        def state_dict(self) -> dict[str, object]:
            return {"a": [object()]}

    with pytest.raises(UsageError, match=r"private\.odd"):
        Private(record).add_object("odd", Odd())
