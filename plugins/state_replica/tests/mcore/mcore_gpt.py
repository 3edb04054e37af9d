"""A GPT of a few thousand parameters in every layout that megatron-core trains on a CPU, built as Megatron's own scripts build it."""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import mcore_warm  # noqa: F401 - first: it makes Megatron importable without CUDA
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import get_num_microbatches, init_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

HIDDEN, VOCABULARY, LENGTH, MICRO = 32, 64, 16, 1


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The layout. ``kind``: fp32, bf16 or fp16; ``overflow``: steps 1, 5, 9 and so on have infinite gradients."""
    parser = argparse.ArgumentParser()
    for name, default in (("tp", 1), ("pp", 1), ("ep", 1), ("virtual", 0), ("experts", 0), ("instances", 1), ("layers", 2), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kind", default="bf16", choices=["fp32", "bf16", "fp16"])
    for flag in ("plain", "overlap-grad", "overlap-param", "tied", "frozen", "rerun", "gradual", "overflow"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--late", help="R@S: rank R sees no end of step S's commit barrier, until a fault cuts it")
    return parser.parse_args(arguments)


class Training:
    """Model chunks, optimizer and schedule of one rank, and its step but for the commit."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.args = args
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=args.tp,
            pipeline_model_parallel_size=args.pp,
            virtual_pipeline_model_parallel_size=args.virtual or None,
            expert_model_parallel_size=args.ep,
            num_distributed_optimizer_instances=args.instances,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        ramp = [args.batch // 2, args.batch // 2, 2 * args.batch] if args.gradual else None
        init_num_microbatches_calculator(rank, ramp, args.batch, MICRO, parallel_state.get_data_parallel_world_size())
        self.config = transformer(args)
        self.ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=args.overlap_grad,
            overlap_param_gather=args.overlap_param,
            use_distributed_optimizer=not args.plain,
            num_distributed_optimizer_instances=args.instances,
            bucket_size=4000 if args.overlap_grad else None,
        )
        self.chunks = [self._chunk(stage) for stage in range(args.virtual or 1)]
        self.optimizer = get_megatron_optimizer(optimizer_config(args), self.chunks)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=1e-2, min_lr=1e-5, lr_warmup_steps=24, lr_decay_steps=800, lr_decay_style="cosine",
            start_wd=0.1, end_wd=0.1, wd_incr_steps=0, wd_incr_style="constant",
        )  # fmt: skip
        self._callbacks()

    def gradients(self, consumed: int) -> None:
        """Forward and backward of a whole batch, gradients reduced."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = [self._batches(consumed, stage) for stage in range(len(self.chunks))]
        get_forward_backward_func()(
            forward_step_func=partial(forward, overflow=self.args.overflow and consumed // self.args.batch % 4 == 1),
            data_iterator=batches if len(batches) > 1 else batches[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=get_num_microbatches(),
            seq_length=LENGTH,
            micro_batch_size=MICRO,
            decoder_seq_length=LENGTH,
            forward_only=False,
        )

    def gathered(self) -> None:
        """All parameters up to date on this rank, as at the end of a training with overlapped gathers. Collective."""
        if self.args.overlap_param:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def _chunk(self, stage: int) -> DistributedDataParallel:
        args, virtual = self.args, {"vp_stage": stage} if self.args.virtual else {}
        model: nn.Module = GPTModel(
            config=self.config,
            transformer_layer_spec=get_gpt_layer_local_spec(num_experts=args.experts or None, moe_grouped_gemm=False),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **virtual),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **virtual),
            share_embeddings_and_output_weights=args.tied,
            position_embedding_type="learned_absolute",
            **virtual,
        )
        for name, parameter in model.named_parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            parameter.requires_grad_(not (args.frozen and "layernorm" in name))
            # Other values on each rank, until they are made equal: a replacement, which is alone then, must be given every one.
            parameter.data += 0.01 * parallel_state.get_data_parallel_rank()
        if args.kind != "fp32":
            model = Float16Module(self.config, model)
        wrapped = DistributedDataParallel(self.config, self.ddp_config, model, disable_bucketing=stage > 0)
        wrapped.broadcast_params()
        return wrapped

    def _callbacks(self) -> None:
        one, several = self.chunks[0], len(self.chunks) > 1
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.no_sync_func = [c.no_sync for c in self.chunks] if several else one.no_sync
        if self.args.overlap_grad and several:
            self.config.grad_sync_func = [c.start_grad_sync for c in self.chunks]
        if self.args.overlap_param:
            self.config.param_sync_func = [c.start_param_sync for c in self.chunks] if several else one.start_param_sync

    def _batches(self, consumed: int, stage: int) -> Iterator[dict[str, Tensor]]:
        """A function of the position and the data parallel rank alone."""
        generator = torch.Generator().manual_seed(1000003 * consumed + 1009 * stage + parallel_state.get_data_parallel_rank())
        while True:
            tokens = torch.randint(0, VOCABULARY, (MICRO, LENGTH), generator=generator)
            yield {
                "input_ids": tokens,
                "labels": (tokens * 3 + 1) % VOCABULARY,
                "position_ids": torch.arange(LENGTH).expand(MICRO, -1).contiguous(),
                "attention_mask": torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1),
            }


def transformer(args: argparse.Namespace) -> TransformerConfig:
    """Everything fused is off, all randomness on."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.kind]
    experts: dict[str, Any] = {}
    if args.experts:
        experts = {
            "num_moe_experts": args.experts,
            "moe_token_dispatcher_type": "allgather",
            "moe_router_topk": 2,
            "add_bias_linear": False,
        }
    return TransformerConfig(
        num_layers=args.layers,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=2 * HIDDEN,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=args.kind == "bf16",
        fp16=args.kind == "fp16",
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.virtual or None,
        expert_model_parallel_size=args.ep,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        attention_softmax_in_fp32=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **experts,
    )


def optimizer_config(args: argparse.Namespace) -> OptimizerConfig:
    """Adam with decoupled weight decay and clipping; for fp16 a scale that soon grows."""
    return OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-5,
        weight_decay=0.1,
        clip_grad=1.0,
        bf16=args.kind == "bf16",
        fp16=args.kind == "fp16",
        params_dtype={"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.kind],
        initial_loss_scale=256.0,
        loss_scale_window=3,
        hysteresis=1,
        use_distributed_optimizer=not args.plain,
        overlap_param_gather=args.overlap_param,
    )


def forward(batches: Iterator[dict[str, Tensor]], model: nn.Module, *, overflow: bool) -> tuple[Tensor, Any]:
    """One micro-batch; ``overflow`` makes its gradients infinite."""
    batch = next(batches)

    def loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean = output.float().mean()
        return mean * float("inf") if overflow else mean, {"loss": mean.detach()}

    output: Tensor = model(**batch)
    return output, loss
