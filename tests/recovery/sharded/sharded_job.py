"""The job of the tests of sharded training: a small language model under ``fully_shard``, and digests of its end.

A mesh is given by its sizes: ``2x3`` replicates twice over three shards, ``4`` only shards, ``2x1x2`` adds tensor parallelism.
"""

import argparse
import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import instep
from instep.testing import point
from instep.testing.finals import digest, tell

if TYPE_CHECKING:
    from instep.plain import PlainSession

    AnySession = instep.Session | PlainSession

WORDS, LENGTH = 31, 6
FEATURES = ("accumulate", "ema", "frozen", "grouped", "keep", "mixed", "offload", "tied", "unclipped")
OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=False),
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, foreach=False),
}


class Block(nn.Module):
    """A small network that adds to its input; ``frozen`` weights get a low-rank addition that learns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.detach().abs().mean()
        result: Tensor = x + self.down(self.drop(torch.tanh(self.up(self.norm(x)))))
        return result


class Model(nn.Module):
    """Embedding, two blocks, a scale of one element (most ranks hold nothing of it), and a head."""

    def __init__(self, width: int, *, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(width, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x * self.scale)
        return result


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="2x2")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--width", type=int, default=17)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--features", default="", help=f"of {', '.join(FEATURES)}; joined by commas")
    parser.add_argument("--forward", type=int, default=-1, help="reshard_after_forward: -1 lets torch decide, 0 is False, 1 is True")
    parser.add_argument("--validate", type=int, default=1, help="steps between validations")
    parser.add_argument("--late", default="", help="R@S: rank R does not see the end of the barrier of step S")
    args = parser.parse_args()
    args.features = set(filter(None, args.features.split(",")))
    assert args.features <= set(FEATURES)
    return args


def build(args: argparse.Namespace, sizes: list[int]) -> tuple[nn.Module, int]:
    """The sharded model, and the number of ranks that see the same data."""
    has = args.features.__contains__
    names = {1: ("shard",), 2: ("replicate", "shard"), 3: ("replicate", "shard", "tensor")}[len(sizes)]
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=names)
    model = Model(args.width, tied=has("tied"))
    if has("frozen"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name or name in ("scale", "head.weight"))
    if "tensor" in names:
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        whole = DTensor.from_local(torch.zeros(3), mesh, (Replicate(),) * 3, run_check=False)
        model.register_buffer("whole", whole, persistent=False)
        mesh = mesh["replicate", "shard"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if has("mixed") else MixedPrecisionPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if args.forward >= 0:
        options["reshard_after_forward"] = bool(args.forward)
    if has("offload"):
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    units: list[Any] = [list(model.blocks)] if has("grouped") else list(model.blocks)
    for unit in [*units, model]:
        fully_shard(unit, **options)
    return model, sizes[2] if len(sizes) > 2 else 1


class Training:
    """All objects of the job, and a step."""

    def __init__(self, args: argparse.Namespace, session: "AnySession") -> None:
        self.args, self.session = args, session
        self.model, alike = build(args, [int(size) for size in args.mesh.split("x")])
        self.data = session.rank // alike
        trained = [p for p in self.model.parameters() if p.requires_grad]
        matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
        self.optimizer = OPTIMIZERS[args.optimizer]([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])  # type: ignore[no-untyped-call]
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.average: list[Tensor] = [p.detach().clone() for p in trained] if "ema" in args.features else []
        self.trained = trained
        self.history: dict[str, list[float]] = {"losses": []}

    def shared(self) -> dict[str, Any]:
        """What is protected, by name."""
        average = {f"average{i}": tensor for i, tensor in enumerate(self.average)}
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "history": self.history, **average}

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Micro-batches of this step, by step and rank."""
        generator = torch.Generator().manual_seed(self.session.step * 100 + self.data)
        for _ in range(2 if "accumulate" in self.args.features else 1):
            text = torch.randint(WORDS, (3, LENGTH + 1), generator=generator)
            yield text[:, :-1], text[:, 1:]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x).flatten(0, 1).float(), y.flatten())

    @torch.no_grad()
    def validate(self) -> float:
        """Leaves the parameters of the root gathered, as evaluation with ``fully_shard`` does."""
        self.model.eval()
        x, y = next(self.batches())
        point("validation")
        loss = self.loss(x, y)
        dist.all_reduce(loss)
        self.model.train()
        return loss.item()

    def step(self) -> None:
        measured = self.validate() if self.session.step % self.args.validate == 0 else None
        batches = list(self.batches())
        for index, (x, y) in enumerate(batches):
            last = index == len(batches) - 1
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
            if "keep" in self.args.features:
                self.model.set_reshard_after_backward(last)  # type: ignore[operator]
            loss = self.loss(x, y) / len(batches)
            loss.backward()
        if "unclipped" not in self.args.features:
            clip_grad_norm_(self.trained, 0.5)
        with self.session.commit():
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            with torch.no_grad():
                for mean, parameter in zip(self.average, self.trained, strict=False):
                    mean.lerp_(parameter, 0.1)
            if measured is not None:
                self.history["losses"] = [*self.history["losses"], measured]

    def final(self) -> dict[str, object]:
        """What a run with faults must share with one without."""
        self.model.reshard()  # type: ignore[operator]
        groups = self.optimizer.param_groups
        return {
            "steps": self.session.step,
            "parameters": digest(dict(self.model.named_parameters())),
            "buffers": digest(dict(self.model.named_buffers())),
            "moments": digest([self.optimizer.state.get(p) for g in groups for p in g["params"]]),
            "groups": digest([{k: v for k, v in g.items() if k != "params"} for g in groups]),
            "average": digest(self.average),
            "schedule": digest(self.scheduler.state_dict()),
            "history": digest(self.history),
            "torch": digest(torch.get_rng_state()),
            "python": digest(random.getstate()),
            "training": [m.training for m in self.model.modules()],
        }


def be_late(session: "AnySession", step: int) -> None:
    """Do not see the end of the barrier of ``step``: a rank that was not scheduled while the others went on."""
    local = session._engine.local  # type: ignore[union-attr]
    wait = local.barrier.wait

    def late(seconds: float) -> bool:
        if session.step != step or local.board.current > 0:
            return wait(seconds)
        time.sleep(seconds)
        if local.board.revoked:
            print(f"cut in the barrier of step {step}", flush=True)
        return False

    local.barrier.wait = late  # type: ignore[method-assign]


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    session = instep.init()
    torch.manual_seed(7)
    random.seed(session.rank)
    if args.late.startswith(f"{session.rank}@"):
        be_late(session, int(args.late.partition("@")[2]))
    training = Training(args, session)
    training.validate()
    session.protect(**training.shared())
    torch.manual_seed(100 + session.rank)

    @session.recoverable
    def train() -> int:
        while session.step < args.steps:
            training.step()
        return session.step

    train()
    tell(training.final())


if __name__ == "__main__":
    main()
