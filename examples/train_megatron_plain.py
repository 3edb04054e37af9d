"""A small GPT on megatron-core, with nothing that protects it: `torchrun --nproc-per-node 4 examples/train_megatron_plain.py`."""

import torch
import torch.distributed as dist
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

STEPS, BATCH, MICRO_BATCH, LENGTH, VOCABULARY, HIDDEN, LAYERS, HEADS = 20, 16, 2, 64, 256, 64, 2, 4
UNFUSED = dict.fromkeys(("gradient_accumulation_fusion", "masked_softmax_fusion", "persist_layer_norm"), False)

dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
if torch.cuda.is_available():
    torch.cuda.set_device(rank % torch.cuda.device_count())
parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
tensor_parallel.model_parallel_cuda_manual_seed(1234)
init_num_microbatches_calculator(rank, None, BATCH, MICRO_BATCH, parallel_state.get_data_parallel_world_size())

config = TransformerConfig(
    num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, bf16=True, params_dtype=torch.bfloat16, use_cpu_initialization=True,
    **UNFUSED,
)  # fmt: skip
ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, num_distributed_optimizer_instances=2, grad_reduce_in_fp32=True)
model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH).cuda()
model = DistributedDataParallel(config, ddp_config, Float16Module(config, model))
optimizer = get_megatron_optimizer(
    OptimizerConfig(lr=1e-2, min_lr=1e-4, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True, clip_grad=1.0), [model]
)
scheduler = OptimizerParamScheduler(
    optimizer, init_lr=0.0, max_lr=1e-2, min_lr=1e-4, lr_warmup_steps=4 * BATCH, lr_decay_steps=STEPS * BATCH, lr_decay_style="cosine",
    start_wd=0.1, end_wd=0.1, wd_incr_steps=0, wd_incr_style="constant",
)  # fmt: skip
config.finalize_model_grads_func = finalize_model_grads
config.no_sync_func = model.no_sync
config.grad_scale_func = optimizer.scale_loss


def batches(step):
    """Each token follows from the one before it; a function of step and rank alone."""
    generator = torch.Generator().manual_seed(step * world + rank)
    while True:
        tokens = (torch.randint(0, VOCABULARY, (MICRO_BATCH, 1), generator=generator) + 7 * torch.arange(LENGTH + 1)) % VOCABULARY
        yield tokens.cuda()


def forward(data, gpt):
    tokens = next(data)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).triu(1)
    losses = gpt(tokens[:, :-1], torch.arange(LENGTH, device=tokens.device).expand(MICRO_BATCH, -1), mask, labels=tokens[:, 1:])
    return losses, lambda output: (output.float().mean(), {"loss": output.float().mean().detach()})


def train():
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=batches(step), model=model, num_microbatches=get_num_microbatches(),
            seq_length=LENGTH, micro_batch_size=MICRO_BATCH, forward_only=False,
        )  # fmt: skip
        updated, norm, _ = optimizer.step()
        if updated:
            scheduler.step(increment=BATCH)
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1:3d}  loss {losses[0]['loss'].item():.4f}  gradient norm {norm:.3f}", flush=True)


train()
dist.destroy_process_group()
