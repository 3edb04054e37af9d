"""The codec keeps every type exactly, gives equal trees equal bytes, and refuses what it cannot keep by its path."""

import enum
import math
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep import codec
from instep.errors import InstepError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

DTYPES = ["float32", "float64", "float16", "bfloat16", "int8", "int32", "int64", "uint8", "bool", "complex64"]


def tensor(dtype: str, shape: tuple[int, ...], seed: int) -> "Tensor":
    size = math.prod(shape) * getattr(torch, dtype).itemsize
    data = torch.randint(0, 2 if dtype == "bool" else 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return cast("Tensor", data.view(getattr(torch, dtype)).reshape(shape))


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.binary().map(bytearray)
    | st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 3])])
    | st.floats(width=32).map(np.float32)
    | st.integers(-(2**63), 2**63 - 1).map(np.int64)
    | st.booleans().map(np.bool_)
)
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(),
    lambda k: st.tuples(k, k) | st.frozensets(k, max_size=3),
    max_leaves=5,
)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.builds(tensor, st.sampled_from(DTYPES), shapes, st.integers(0, 99))
arrays = st.builds(
    lambda t: t.numpy(), st.builds(tensor, st.sampled_from([d for d in DTYPES if d != "bfloat16"]), shapes, st.integers(0, 99))
)


def containers(values: "st.SearchStrategy[object]") -> "st.SearchStrategy[object]":
    mappings = st.dictionaries(keys, values, max_size=5)
    return (
        st.lists(values, max_size=12)
        | st.lists(values, max_size=12).map(tuple)
        | st.lists(values, max_size=4).map(lambda v: deque(v, 4))
        | mappings
        | mappings.map(OrderedDict)
        | st.sets(keys, max_size=5)
        | st.frozensets(keys, max_size=5)
        | st.dictionaries(keys, st.integers(), max_size=5).map(Counter)
    )


trees = st.recursive(
    scalars | tensors | arrays | st.lists(st.integers(), min_size=6) | st.lists(st.floats(), min_size=6), containers, max_leaves=15
)


def exact(value: Any) -> object:
    """A form of ``value`` that is equal for equal types and bits alone: 1, True and 1.0 differ, NaN is itself, -0.0 is not 0.0."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return kind, value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, np.ndarray | np.generic):
        return kind, value.dtype, value.shape, value.tobytes()
    if isinstance(value, float | complex):
        return kind, struct.pack("2d", value.real, value.imag)
    if isinstance(value, dict):
        return kind, [(exact(k), exact(v)) for k, v in value.items()]
    if isinstance(value, set | frozenset):
        return kind, sorted(repr(exact(v)) for v in value)
    if isinstance(value, list | tuple | deque):
        return kind, getattr(value, "maxlen", None), [exact(v) for v in value]
    return kind, value


def same(a: object, b: object) -> bool:
    """Equal to the bit and of one type, all the way down."""
    return exact(a) == exact(b)


@settings(max_examples=60, deadline=None)
@given(trees)
def test_a_tree_survives_to_the_bit(tree: object) -> None:
    data = codec.encode(tree)
    assert same(codec.decode(data), tree)
    assert codec.encode(codec.decode(data)) == data


@settings(max_examples=60, deadline=None)
@given(trees)
def test_a_tree_and_its_tensors_part_and_meet(tree: object) -> None:
    data, parts = codec.split(tree)
    assert [(s.dtype, s.shape) for s in codec.specs(data)] == [(str(t.dtype)[6:], tuple(t.shape)) for t in parts]
    assert same(codec.decode(data, parts), tree)


@settings(max_examples=60, deadline=None)
@given(trees, st.data())
def test_damage_is_an_error_of_our_own_and_never_a_crash(tree: object, data: "st.DataObject") -> None:
    good = codec.encode(tree)
    at = data.draw(st.integers(0, len(good) - 1))
    with pytest.raises(InstepError):
        codec.decode(good[:at])
    flipped = bytearray(good)
    flipped[at] ^= data.draw(st.integers(1, 255))
    try:
        codec.decode(bytes(flipped))
    except InstepError:
        return


def test_split_hands_out_the_very_tensors() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    data, parts = codec.split({"w": parameter, "n": 3, "again": [parameter]})
    assert all(part is parameter for part in parts)
    assert len(parts) == 2
    assert len(data) < 250


def test_real_state_dicts_come_back() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters(), "weight_decay": 0.0}])
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    schedule.step()
    for state in (model.state_dict(), optimizer.state_dict(), schedule.state_dict(), torch.amp.GradScaler("cpu").state_dict()):
        assert same(codec.decode(codec.encode(state)), state)


def test_generator_states_come_back() -> None:
    import random

    states = {"python": random.getstate(), "numpy": np.random.RandomState(3).get_state(), "torch": torch.get_rng_state()}
    assert same(codec.decode(codec.encode(states)), states)


def test_a_default_dict_comes_back_as_a_dict() -> None:
    assert same(codec.decode(codec.encode(defaultdict(list, {1: [2]}))), {1: [2]})


def test_memory_layout_and_views_do_not_change_the_bytes() -> None:
    wide = torch.arange(24.0).reshape(2, 3, 4)
    assert codec.encode(wide.transpose(0, 2)) == codec.encode(wide.transpose(0, 2).contiguous())
    assert codec.encode(torch.tensor([1 + 2j]).conj()) == codec.encode(torch.tensor([1 - 2j]))
    assert same(codec.decode(codec.encode(np.asfortranarray(np.ones((2, 3))))), np.ones((2, 3)))


def test_sets_have_one_encoding_in_every_process() -> None:
    program = "from instep import codec; print(codec.encode({'alpha', 'beta', 'gamma', ('delta', 1)}).hex())"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True, timeout=30
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1


class Colour(enum.Enum):
    RED = 1


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("tree", "path", "type_name"),
    [
        ({"a": [0, 1, 2, object()]}, "opt['a'][3]", "builtins.object"),
        ({"a": ({"b": Colour.RED},)}, "opt['a'][0]['b']", "Colour"),
        ({("x", 1): lambda: 0}, "opt[('x', 1)]", "builtins.function"),
        ([Text("no")], "opt[0]", "Text"),
        ({Colour.RED: 1}, "opt.keys()[0]", "Colour"),
        ({Colour.RED}, "opt.element", "Colour"),
        (torch.ones(2).to_sparse(), "opt", "torch.sparse_coo"),
        ([torch.empty(2, device="meta")], "opt[0]", "meta"),
        ({torch.ones(1): 1}, "opt.keys()[0]", "tensor as a key"),
        (np.array([object()]), "opt", "object"),
        (np.zeros(2, dtype=[("a", "f4")]), "opt", "numpy array"),
        (iter([1]), "opt", "list_iterator"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_path(tree: object, path: str, type_name: str) -> None:
    for function in (codec.encode, codec.split):
        with pytest.raises(UsageError) as caught:
            function(tree, where="opt")
        message = str(caught.value)
        assert message.startswith(f"{path}: ")
        assert type_name in message
        assert "state_dict()" in message


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[object] = []
    tree.append(tree)
    with pytest.raises(UsageError, match="contains itself"):
        codec.encode(tree)


def test_tensors_that_do_not_fit_are_named() -> None:
    data, parts = codec.split([torch.ones(2, 3)])
    with pytest.raises(InstepError, match="missing"):
        codec.decode(data, [])
    with pytest.raises(InstepError, match=r"\(3, 2\)"):
        codec.decode(data, [torch.ones(3, 2)])
    with pytest.raises(InstepError, match="given 2"):
        codec.decode(data, [*parts, *parts])


def test_plain_trees_need_no_torch() -> None:
    program = "import sys; from instep import codec; codec.decode(codec.encode({'a': [1, 2.5, {'b'}]})); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert run.stdout.strip() == "False"
