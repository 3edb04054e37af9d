"""What a hook may return, and what is wrong with an answer or with what its annotation promises."""

import inspect
import json
import types
import typing
from collections.abc import Mapping, Sequence

from instep.hooks import CommsRequest, Recovery
from instep.model import Fault, Plan, Receipt, Unrecoverable

NOTHING = ("committed", "quiesce", "report", "close")
_MAY: Mapping[str, tuple[tuple[type, ...], str]] = {
    "environment": ((Mapping,), "a mapping of names of variables to strings, or None"),
    "start": ((Mapping,), "a mapping of port names to numbers, or None"),
    "begin": ((int,), "a number of steps, or None"),
    "keep": ((object,), "what is kept, with `settled(seconds)` and `copies()`, or None"),
    "detect": ((Fault,), "a Fault, or None"),
    "announce": ((Mapping,), "a mapping of notes that JSON can hold, or None"),
    "plan": ((Plan, Unrecoverable), "a Plan, an Unrecoverable, or None"),
    "reinit_comms": ((Sequence,), "a sequence with one communicator for each group, or None"),
    "restore_state": ((Receipt,), "a Receipt, or None"),
    "resume_data": ((Receipt,), "a Receipt, or None"),
    "verify": ((Receipt,), "a Receipt, or None"),
    **dict.fromkeys(NOTHING, ((), "nothing (None)")),
}
_PORTS = 65536


def wrong_answer(hook: str, answer: object, arguments: Mapping[str, object]) -> str | None:
    """What is wrong with a hook's answer, ``None`` if nothing is."""
    if answer is None:
        return None
    kinds, words = _MAY[hook]
    if not isinstance(answer, kinds) or isinstance(answer, str | bytes):
        return f"returned {_short(answer)} of type {type(answer).__name__}; it must return {words}"
    if hook == "start" and isinstance(answer, Mapping):
        odd = {k: v for k, v in answer.items() if not isinstance(k, str) or not isinstance(v, int) or not 0 < v < _PORTS}
        return f"returned {odd!r}: a port is a name and a number from 1 to 65535" if odd else None
    if hook in {"announce", "keep"}:
        return _no_json(answer) if hook == "announce" else _nothing_kept(answer)
    if hook == "environment" and isinstance(answer, Mapping):
        odd = {k: v for k, v in answer.items() if not isinstance(k, str) or not isinstance(v, str)}
        return f"returned {odd!r}: a variable is a name and a string" if odd else None
    request, recovery = arguments.get("request"), arguments.get("recovery")
    if isinstance(request, CommsRequest) and isinstance(answer, Sequence):
        return _wrong_communicators(answer, len(request.groups))
    if isinstance(recovery, Recovery) and isinstance(answer, Receipt):
        return _wrong_receipt(hook, answer, recovery.rank)
    return None


def wrong_annotation(hook: str, method: object) -> str | None:
    """What is wrong with the type that an implementation says it returns; what cannot be evaluated is left to mypy."""
    annotation = inspect.signature(method).return_annotation if callable(method) else inspect.Signature.empty
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, getattr(method, "__globals__", {}))  # noqa: S307 - as typing.get_type_hints does
        except Exception:  # noqa: BLE001 - names of TYPE_CHECKING, most likely
            return None
    if annotation is inspect.Signature.empty or annotation is typing.Any:
        return None
    kinds, words = _MAY[hook]
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if union else (annotation,)
    bases = [typing.get_origin(m) or m for m in members if m not in (None, type(None))]
    odd = [b for b in bases if isinstance(b, type) and (not issubclass(b, kinds) or issubclass(b, str | bytes))]
    if not odd:
        return None
    return f"says that it returns {', '.join(b.__name__ for b in odd)}; it must return {words}"


def _nothing_kept(answer: object) -> str | None:
    if all(callable(getattr(answer, name, None)) for name in ("settled", "copies")):
        return None
    return f"returned {_short(answer)}, which has no `settled()` and `copies()`: see instep.hooks.Kept"


def _no_json(answer: object) -> str | None:
    try:
        json.dumps(answer, allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"returned what JSON cannot hold ({error}): notes travel in the address book"
    return None


def _wrong_communicators(answer: Sequence[object], count: int) -> str | None:
    if len(answer) != count:
        return f"returned {len(answer)} communicators for {count} groups; it must return one for each group, in order"
    odd = [c for c in answer if not (hasattr(c, "group") and callable(getattr(c, "abandon", None)))]
    return f"returned {_short(odd[0])}, which has no `group` and `abandon()`: see instep.hooks.Communicator" if odd else None


def _wrong_receipt(hook: str, receipt: Receipt, rank: int) -> str | None:
    if receipt.phase != hook:
        return f"returned a receipt for phase '{receipt.phase}'; it must be for '{hook}'"
    if receipt.rank != rank:
        return f"returned a receipt of rank {receipt.rank} on rank {rank}"
    if receipt.seconds < 0 or receipt.bytes < 0:
        return f"returned a receipt with negative seconds or bytes: {receipt!r}"
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."
