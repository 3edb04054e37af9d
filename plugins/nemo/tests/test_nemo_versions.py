"""What does not go together is told before anything of it is imported: these tests need no NeMo, its metadata is made up."""

import importlib.util
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError

import pytest

import instep_nemo
from instep.errors import UsageError
from instep_nemo import twins, versions


def said(found: Mapping[str, str]) -> str:
    def version(name: str) -> str:
        try:
            return found[name]
        except KeyError:
            raise PackageNotFoundError(name) from None

    try:
        versions.check(version)
    except UsageError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("nemo", "megatron", "parts"),
    [
        (None, None, ["NeMo is not installed", "pip install 'nemo-toolkit[lightning]==2.7.3'"]),
        ("3.0.0", "0.16.1", ["nemo-toolkit 3.0.0 has no LLM collection", "2.7.3", "instep_state_replica.megatron"]),
        ("3.1.0rc0", None, ["has no LLM collection"]),
        ("2.4.1", "0.15.3", ["from 2.5.0 to below 2.8.0, this is 2.4.1"]),
        ("2.7.3", None, ["megatron-core, which is not installed", "pip install 'megatron-core==0.15.3'"]),
        ("2.7.3", "0.16.1", ["beside megatron-core 0.16.1", "no_weight_decay_cond", "pip install 'megatron-core==0.15.3'"]),
        ("2.7.3", "0.14.0", ["megatron-core from 0.15.3 on, this is 0.14.0"]),
        ("2.7.3", "0.15.3", ["nothing"]),
        ("2.6.2", "0.15.4", ["nothing"]),
    ],
)
def test_what_goes_together(nemo: str | None, megatron: str | None, parts: list[str]) -> None:
    found = {name: version for name, version in ((versions.NEMO, nemo), (versions.MEGATRON, megatron)) if version is not None}

    assert all(part in said(found) for part in parts), said(found)


def test_without_nemo_the_callback_says_how_to_get_it() -> None:
    if importlib.util.find_spec("nemo") is not None:
        pytest.skip("NeMo is installed here")
    with pytest.raises(UsageError, match=r"NeMo is not installed: pip install 'nemo-toolkit\[lightning\]==2\.7\.3'"):
        _ = instep_nemo.InstepCallback


def test_an_unknown_name_is_no_matter_of_nemo() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Callback'"):
        _ = instep_nemo.Callback


@pytest.mark.parametrize(("instances", "distributed", "kept"), [(2, True, False), (1, False, False), (1, True, True)])
def test_state_with_a_replica_is_let_through(instances: int, distributed: bool, kept: bool) -> None:
    twins.check(instances=instances, distributed=distributed, kept=kept)


def test_one_instance_without_buddies_names_both_remedies() -> None:
    with pytest.raises(UsageError, match=r"num_distributed_optimizer_instances=2.*plugins\.state_replica\.buddies = true"):
        twins.check(instances=1, distributed=True, kept=False)
