"""Which NeMo and which megatron-core go together, told from their metadata before either is imported."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from instep.errors import UsageError

NEMO, MEGATRON = "nemo-toolkit", "megatron-core"
NEMO_RANGE = ((2, 5, 0), (2, 8, 0))
"""From which and below which version of NeMo its strategy was read; recoveries are tested with 2.7.3."""
MEGATRON_RANGE = ((0, 15, 3), (0, 16, 0))
INSTALL = "pip install 'nemo-toolkit[lightning]==2.7.3' 'megatron-core==0.15.3'"


def check(found: Callable[[str], str] = version) -> None:
    """Raise ``UsageError`` for what is missing or does not go together. ``found`` tells a distribution's version, or raises."""
    if (why := misfit(found)) is not None:
        raise UsageError(f"instep_nemo: {why}")


def misfit(found: Callable[[str], str] = version) -> str | None:
    """What is wrong with the NeMo and the megatron-core of this environment, and the remedy; ``None`` if nothing is."""
    nemo, megatron = _of(NEMO, found), _of(MEGATRON, found)
    if nemo is None:
        return f"NeMo is not installed: {INSTALL}"
    if _numbers(nemo) >= (3, 0, 0):
        return (
            f"nemo-toolkit {nemo} has no LLM collection and no MegatronStrategy any more; the last one that has is 2.7.3: {INSTALL}. "
            "What trains on megatron-core without NeMo uses instep_state_replica.megatron"
        )
    if not NEMO_RANGE[0] <= _numbers(nemo) < NEMO_RANGE[1]:
        return f"it knows nemo-toolkit from {_dotted(NEMO_RANGE[0])} to below {_dotted(NEMO_RANGE[1])}, this is {nemo}: {INSTALL}"
    if megatron is None:
        return f"nemo-toolkit {nemo} trains LLMs on megatron-core, which is not installed: pip install 'megatron-core==0.15.3'"
    if _numbers(megatron) >= MEGATRON_RANGE[1]:
        return (
            f"nemo-toolkit {nemo} beside megatron-core {megatron}: from 0.16 on get_megatron_optimizer() does not take "
            "no_weight_decay_cond, which NeMo gives it, so no optimizer can be made: pip install 'megatron-core==0.15.3'"
        )
    if _numbers(megatron) < MEGATRON_RANGE[0]:
        return f"it knows megatron-core from {_dotted(MEGATRON_RANGE[0])} on, this is {megatron}: pip install 'megatron-core==0.15.3'"
    return None


def _of(name: str, found: Callable[[str], str]) -> str | None:
    try:
        return found(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    numbers = [int("".join(c for c in part if c.isdigit()) or 0) for part in text.split(".")[:3]]
    return tuple(numbers + [0] * (3 - len(numbers)))


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
