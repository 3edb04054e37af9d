"""The kinds of shard groups that a Megatron job has. Each one is an ``instep.torch.adapter.ShardGroup``."""

from collections.abc import Mapping

from torch import Tensor, nn

from instep.torch.adapter import Tree, name, tree
from instep.torch.overlay import branch
from instep.torch.protected import OptimizerState, Protected, kind
from instep_state_replica.megatron.foreign import Part, stepped


class Parameters:
    """Parameters that are sent as they are: a fixed set of tensors."""

    def __init__(self, what: str, replicas: tuple[int, ...], named: Mapping[str, nn.Parameter]) -> None:
        self.name, self.replicas = name(what, replicas), replicas
        self._named = dict(named)

    def tree(self) -> Tree:
        """See ``ShardGroup``."""
        return tree(tensors=self._named)

    def fit(self, theirs: Tree) -> Tree:  # noqa: ARG002 - there is nothing more to compare
        """Names, shapes and types are compared by whoever lays the trees over each other."""
        return self.tree()

    def load(self, tree: Tree) -> None:
        """Everything was written in place."""


class Shard:
    """What optimizers own: fp32 main parameters, moments, steps, and the values of their groups.

    Moments exist from the first update on; a receiver takes exactly the donor's, whatever it has itself. ``model`` names the model's
    parameters by their ids: an optimizer may step them directly, and then they are not its own.
    """

    def __init__(self, what: str, replicas: tuple[int, ...], parts: Mapping[str, Part], *, model: Mapping[int, str]) -> None:
        self.name, self.replicas = name(what, replicas), replicas
        self._parts = dict(parts)
        self._states = {key: OptimizerState(key, part.optimizer) for key, part in parts.items()}
        for key, state in self._states.items():
            state.name_parameters(stepped(parts[key], model))
        self._main: dict[str, Tensor] = {
            f"{key}.main.{i}": p for key, state in self._states.items() for i, p in enumerate(state.parameters()) if id(p) not in model
        }

    def tree(self) -> Tree:
        """See ``ShardGroup``."""
        kinds = {key: f"{type(part).__name__} over {type(part.optimizer).__name__}" for key, part in self._parts.items()}
        return tree(kinds=kinds, tensors=self._main, objects={key: state.tree() for key, state in self._states.items()})

    def fit(self, theirs: Tree) -> Tree:
        """Raises ``UsageError`` when the groups have other parameters, or in another order."""
        objects = branch(theirs, "objects")
        for key, state in self._states.items():
            state.check(objects.get(key))
        return self.tree()

    def load(self, tree: Tree) -> None:
        """Moments and group values; main parameters were written in place."""
        objects = branch(tree, "objects")
        for key, state in self._states.items():
            state.load(objects[key])


class Schedule:
    """The position of the learning rate's schedule. Rates themselves are values of the optimizer's groups."""

    def __init__(self, what: str, replicas: tuple[int, ...], scheduler: object) -> None:
        self.name, self.replicas = name(what, replicas), replicas
        self._what, self._type = what, f"{type(scheduler).__module__}.{type(scheduler).__qualname__}"
        self._state: Protected = _ParamScheduler(scheduler) if _megatrons(scheduler) else kind(what, scheduler)

    def tree(self) -> Tree:
        """See ``ShardGroup``."""
        return tree(kinds={self._what: self._type}, objects={self._what: self._state.tree()})

    def fit(self, theirs: Tree) -> Tree:
        """The schedule itself must judge."""
        self._state.check(branch(theirs, "objects").get(self._what))
        return self.tree()

    def load(self, tree: Tree) -> None:
        """Through the schedule."""
        self._state.load(branch(tree, "objects")[self._what])


class _ParamScheduler:
    """Megatron's ``OptimizerParamScheduler``, whose ``load_state_dict`` adds to the live position and sets rates by it.

    Its ``state_dict`` names its attributes.
    """

    def __init__(self, scheduler: object) -> None:
        self._scheduler = scheduler

    def tree(self) -> object:
        """All values of the schedule."""
        return self._scheduler.state_dict()  # type: ignore[attr-defined]

    def check(self, tree: object) -> None:
        """Any position fits."""

    def load(self, tree: object) -> None:
        """Set them, and nothing else."""
        assert isinstance(tree, dict)
        for key, value in tree.items():
            setattr(self._scheduler, key, value)


def _megatrons(scheduler: object) -> bool:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return isinstance(scheduler, OptimizerParamScheduler)
