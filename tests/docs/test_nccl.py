"""The page on NCCL and EFA names what the code does, and the counted figures are those that the benchmark counts."""

import importlib
import re

import pytest

from instep import profiles
from instep_init_nccl.exports import EFA, exports
from instep_init_nccl.machine import Machine
from instep_init_nccl.profile_hyperpod import MANIFEST
from instep_init_nccl.profile_variables import RULES

from .pages import DOCS, ROOT

PAGE = (DOCS / "how-to" / "nccl.md").read_text()
SCALE = (DOCS / "explanation" / "scale.md").read_text()


def rows(text: str) -> dict[str, str]:
    """Second cells of all tables by their first cells."""
    return dict(re.findall(r"^\| `?([^|`]+?)`? \| ([^|]+?) \|", text, re.MULTILINE))


def test_every_variable_that_workers_are_given_is_there_with_its_default() -> None:
    told = rows(PAGE)
    for export in exports(efa=True, machine=Machine()):
        if export.name != "NCCL_NET_PLUGIN":
            assert told[export.name] == export.value
    assert "NCCL_NET_PLUGIN" in told
    assert PAGE.index("With `efa = true` also") < min(PAGE.index(f"| `{export.name}`") for export in EFA)


def test_every_profile_and_every_variable_that_does_harm_is_named() -> None:
    ours = {name for name, entry in profiles.installed().items() if entry.dist is not None and entry.dist.name == "instep-init-nccl"}
    assert {name for name in ours if f"## Profile `{name}`" not in PAGE} == set()
    assert ours == {"efa", "hyperpod-1.0.0"}
    assert [rule.name for rule in RULES if rule.name not in PAGE] == []


def test_the_manifest_is_that_of_the_code() -> None:
    told = rows(PAGE)
    assert {component.name: told.get(component.name) for component in MANIFEST} == {c.name: c.expected for c in MANIFEST}


@pytest.mark.timeout(120)
def test_the_counts_of_computed_ids_are_those_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """They depend on no release and no machine: NCCL's messages have a fixed size. What torch's store says may change with torch."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name, value in (("RES_OPTIONS", "timeout:1 attempts:1"), ("TORCH_CPP_LOG_LEVEL", "ERROR")):
        monkeypatch.setenv(name, value)
    bench = importlib.import_module("bootstrap_scale")
    counted = [row for size in (4, 8, 16) for row in bench.measure(size)]
    ours = [row for row in counted if row.kind == bench.OURS]
    assert {(row.rank_messages, row.rank_bytes, row.busiest_messages, row.busiest_bytes) for row in ours} == {(6, 1056, 6, 1056)}
    assert len(re.findall(r"\| \d+ \| 6\.0 \| 1,056 B \| 6 \| 1,056 B \| every rank \|", SCALE)) == 2
    far, worst = bench.extrapolate(counted, bench.OURS, "far", size=bench.FAR, roots=bench.FAR)
    assert (far.ranks, round(far.busiest_messages), round(far.busiest_bytes)) == (100_000, 6, 1056)
    assert worst < 1e-6
    (store,) = [row for row in counted if row.kind == bench.ONE and row.ranks == 8]
    assert store.busiest_messages > 8, "whoever serves the store hears all ranks"
