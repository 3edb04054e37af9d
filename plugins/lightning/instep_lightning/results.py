"""What ``self.log`` has collected, and metrics of torchmetrics: as trees that the codec knows, and back on another process."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from instep.errors import UsageError
from instep_lightning.flavour import Foreign, part

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_META = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx", "metric_attribute",
)  # fmt: skip
_VALUES = ("has_reset", "_update_count", "_computed", "_forward_cache")
_METRIC = ("_update_count", "_computed", "_forward_cache")


def dump(results: Foreign) -> dict[str, object]:
    """A collection of results."""
    rows = [{"key": key, "meta": _meta(m.meta), "tensor": m.is_tensor, "state": _values(m)} for key, m in results.items()]
    return {"rows": rows, "batch_size": results.batch_size, "dataloader_idx": results.dataloader_idx}


def load(trainer: "Trainer", results: Foreign, tree: Mapping[str, Foreign]) -> None:
    """Make the collection what was dumped; entries that another process had made are made here."""
    made = {row["key"]: _entry(trainer, results.get(row["key"]), row) for row in tree["rows"]}
    results.clear()
    results.update(made)
    results.batch, results.batch_size, results.dataloader_idx = None, tree["batch_size"], tree["dataloader_idx"]


def dump_metrics(trainer: "Trainer") -> dict[str, object]:
    """The metrics that the module has as attributes: what they have summed up or gathered."""
    return {
        name: {**{key: getattr(m, key) for key in m._defaults}, **{key: getattr(m, key, None) for key in _METRIC}}
        for name, m in _metrics(trainer).items()
    }


def load_metrics(trainer: "Trainer", tree: Mapping[str, Mapping[str, object]]) -> None:
    """Set them back; what a cut left half synchronised is synchronised no more."""
    for name, metric in _metrics(trainer).items():
        for key, value in tree[name].items():
            setattr(metric, key, _placed(trainer, value))
        metric._is_synced, metric._cache, metric._should_unsync, metric._enable_grad = False, None, True, False
        metric._to_sync = metric.sync_on_compute


def _metrics(trainer: "Trainer") -> dict[str, Foreign]:
    kind = part(trainer, "trainer.connectors.logger_connector.result").Metric
    return {name: m for name, m in trainer.lightning_module.named_modules() if isinstance(m, kind)}


def _meta(meta: Foreign) -> dict[str, object]:
    sync = {"should": meta.sync._should, "op": meta.sync._op, "rank_zero_only": meta.sync.rank_zero_only, "group": _name(meta)}
    return {**{key: getattr(meta, key) for key in _META}, "reduce_fx": meta.reduce_fx.__name__, "sync": sync}


def _name(meta: Foreign) -> str | None:
    """Groups have the same names in a replacement, which makes them in the same order."""
    group = meta.sync._group
    names = c10d._world.pg_names
    if group is not None and group not in names:
        raise UsageError(f"self.log({meta.name!r}, sync_dist_group=...): that process group is not one of torch.distributed's any more")
    return None if group is None else str(names[group])


def _group(name: str | None) -> Foreign:
    return next((group for group, known in c10d._world.pg_names.items() if name == known), None)


def _values(entry: Foreign) -> dict[str, object]:
    state = {key: getattr(entry, key, None) for key in _VALUES}
    if entry.is_tensor:
        state |= {key: getattr(entry, key) for key in ("value", "cumulated_batch_size") if hasattr(entry, key)}
    return {key: value.detach() if isinstance(value, Tensor) else value for key, value in state.items()}


def _entry(trainer: "Trainer", entry: Foreign, row: Mapping[str, Foreign]) -> Foreign:
    if entry is None:
        entry = _made(trainer, row["meta"], tensor=row["tensor"])
    for key, value in row["state"].items():
        setattr(entry, key, _placed(trainer, value))
    if not entry.is_tensor:
        entry.value = trainer.lightning_module.get_submodule(entry.meta.metric_attribute)
    return entry


def _made(trainer: "Trainer", meta: Mapping[str, Foreign], *, tensor: bool) -> Foreign:
    module = part(trainer, "trainer.connectors.logger_connector.result")
    sync = meta["sync"]
    made = module._Metadata(**{key: meta[key] for key in _META}, reduce_fx=getattr(torch, meta["reduce_fx"]))
    made.sync = module._Sync(
        fn=trainer.strategy.reduce,
        _should=sync["should"],
        _op=sync["op"],
        _group=_group(sync["group"]),
        rank_zero_only=sync["rank_zero_only"],
    )
    return module._ResultMetric(made, tensor).to(trainer.strategy.root_device)


def _placed(trainer: "Trainer", value: object) -> object:
    if isinstance(value, list):
        return [_placed(trainer, each) for each in value]
    return value.to(trainer.strategy.root_device, copy=True) if isinstance(value, Tensor) else value
