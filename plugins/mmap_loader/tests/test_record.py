"""Records: every type comes back, and no damaged or forged byte gets through."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from instep import codec
from instep.errors import UsageError
from instep_mmap_loader.errors import Refused
from instep_mmap_loader.order import At
from instep_mmap_loader.record import Label, draft, peek, read, write

LABEL = Label("batch", At(1, 20), At(1, 24), "f" * 32, 3)
BATCH = {
    "tokens": torch.arange(12).reshape(3, 4),
    "parts": (torch.rand(3), [torch.rand(2, 2).bfloat16(), None, True, 1.5, float("inf"), "word", b"bytes"]),
    "scalar": torch.tensor(7.0),
    "nothing": torch.empty(0, 5),
    "complex": torch.tensor([1 + 2j]),
    "strided": torch.rand(4, 6).t(),
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    3: {"deep": (np.float32(2.5), torch.tensor([True, False]))},
}


def written(batch: object, *, size: int = 1 << 16, state: bytes | None = None) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    data = np.full(size, 255, np.uint8)
    write(draft(LABEL, batch, state), data)
    return data


def test_everything_comes_back() -> None:
    content = read(written(BATCH, state=b"position"), fingerprint=LABEL.fingerprint)
    assert content.label == LABEL
    assert content.state == b"position"
    assert codec.encode(content.tree) == codec.encode(BATCH)
    assert peek(written(BATCH)) == LABEL


def test_it_is_a_safetensors_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "record"
    path.write_bytes(written(BATCH).tobytes())
    tensors = safetensors.load_file(path)
    assert any(torch.equal(t, BATCH["tokens"]) for t in tensors.values() if t.dtype == torch.int64 and t.ndim == 2)  # type: ignore[arg-type]


def test_an_unknown_type_is_named_with_its_path() -> None:
    with pytest.raises(UsageError, match=r"batch\['a'\]\[1\]: a value of type pathlib\.\w*Path"):
        draft(LABEL, {"a": [1, Path("x")]})


def test_no_flipped_bit_gets_through() -> None:
    whole = written(BATCH)
    used = int(json.loads(whole[8:].tobytes()[: int.from_bytes(whole[:8].tobytes(), "little")])["__metadata__"]["used"])
    begin = 8 + int.from_bytes(whole[:8].tobytes(), "little")
    draw = random.Random(1)
    for place in [*range(16), *draw.sample(range(16, begin + used), 400)]:
        data = whole.copy()
        data[place] ^= 1 << draw.randrange(8)
        with pytest.raises(Refused):
            read(data, fingerprint=LABEL.fingerprint)


@pytest.mark.parametrize("size", [0, 7, 8, 100, 700, 1200])
def test_a_truncated_file_is_refused(size: int) -> None:
    with pytest.raises(Refused):
        read(written(BATCH)[:size], fingerprint=LABEL.fingerprint)


def test_another_fingerprint_is_refused() -> None:
    with pytest.raises(Refused, match="another data set"):
        read(written(BATCH), fingerprint="0" * 32)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"data_offsets": [0, ', b'"data_offsets": [9, '),
        (b'"used": "', b'"used": "9'),
        (b'"used": "', b'"used": "-'),
        (b'"at": "1,20"', b'"at": "1,x0"'),
        (b'"kind": "batch"', b'"kind": "sheep"'),
        (b'"format": "instep', b'"format": "jnstep'),
        (b'"__metadata__": {', b'"__metadatx__": {'),
        (b'"__metadata__": {', b'"__metadata__": 7, {'),
    ],
)
def test_a_forged_header_is_refused(old: bytes, new: bytes) -> None:
    whole = written(BATCH).tobytes()
    assert whole.count(old) == 1
    data = whole.replace(old, new)[: len(whole)]
    with pytest.raises(Refused):
        read(np.frombuffer(data, np.uint8), fingerprint=LABEL.fingerprint)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("__metadata__",), []),
        (("__metadata__", "xxh3"), "\ud800" * 16),
        (("__metadata__", "used"), "1e9"),
        (("__metadata__", "at"), "1,2,3"),
        (("t0", "data_offsets"), [0, float("inf")]),
        (("t0", "data_offsets"), [8, 0]),
        (("t0", "shape"), [1 << 70]),
        (("t0", "shape"), [-1]),
        (("t0", "shape"), [[1]]),
        (("t0", "dtype"), ["F32"]),
        (("t1", "shape"), [1 << 40]),
        (("t1",), None),
        (("tree",), {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
    ],
    ids=str,
)
def test_a_forger_who_knows_the_checksum_is_refused_too(place: tuple[str, ...], value: object) -> None:
    """Nothing but ``Refused`` comes out, whatever the header says, and no memory is taken on its word."""
    data = written({"full": torch.arange(12).reshape(3, 4), "empty": torch.empty(0, 5)}).tobytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    tree = json.loads(data[8:begin])
    target = tree
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    metadata = tree["__metadata__"]
    if isinstance(metadata, dict) and place[-1] != "xxh3":
        metadata["xxh3"] = "0" * 16
        used = int(json.loads(data[8:begin])["__metadata__"]["used"])
        header = json.dumps(tree).encode()
        digest = xxhash.xxh3_64_hexdigest(header + data[begin : begin + used])
        data = len(header).to_bytes(8, "little") + header.replace(b"0" * 16, digest.encode(), 1) + data[begin:]
    else:
        header = json.dumps(tree).encode()
        data = len(header).to_bytes(8, "little") + header + data[begin:]
    with pytest.raises(Refused):
        read(np.frombuffer(data, np.uint8), fingerprint=LABEL.fingerprint)


def test_a_header_that_nests_for_ever_is_refused() -> None:
    header = b"[" * 200_000
    with pytest.raises(Refused, match="no JSON"):
        read(np.frombuffer(len(header).to_bytes(8, "little") + header, np.uint8), fingerprint="f")
