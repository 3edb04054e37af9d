"""A tiny GPT in NVIDIA NeMo, pretrained or fine-tuned with LoRA, with nothing that protects it."""

import argparse

import nemo.lightning as nl
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.loggers import CSVLogger
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo.collections import llm
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch.utils.data import DataLoader, Dataset

LENGTH, MICRO_BATCH, BATCH, VOCABULARY = 32, 2, 16, 128


class Sequences(Dataset):
    """In each sequence, a token follows from the one before it."""

    def __init__(self, size, seed):
        self.first = torch.randint(0, VOCABULARY, (size,), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.first)

    def __getitem__(self, index):
        tokens = (self.first[index] + 7 * torch.arange(LENGTH + 1)) % VOCABULARY
        return {
            "tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": torch.ones(LENGTH), "position_ids": torch.arange(LENGTH),
            "attention_mask": torch.ones(1, LENGTH, LENGTH, dtype=torch.bool).triu(1),
        }  # fmt: skip


class Data(LightningDataModule):
    """NeMo deals sequences out by its sampler; a step takes as many micro-batches as the global batch has for each rank."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.data_sampler = MegatronDataSampler(seq_len=LENGTH, micro_batch_size=MICRO_BATCH, global_batch_size=BATCH)

    def train_dataloader(self):
        return DataLoader(Sequences(self.steps * BATCH, seed=1))

    def val_dataloader(self):
        return DataLoader(Sequences(4 * BATCH, seed=2))


def model(peft):
    """Two layers, everything of them fused switched off, so that a CPU will do."""
    config = llm.GPTConfig(
        num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, seq_length=LENGTH, vocab_size=VOCABULARY,
        hidden_dropout=0.1, attention_dropout=0.1, share_embeddings_and_output_weights=False,
        masked_softmax_fusion=False, persist_layer_norm=False, gradient_accumulation_fusion=False,
        bias_activation_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False, use_cpu_initialization=True,
    )  # fmt: skip
    optimizer = nl.MegatronOptimizerModule(
        config=OptimizerConfig(optimizer="adam", lr=5e-3, bf16=True, use_distributed_optimizer=True, clip_grad=1.0),
        lr_scheduler=nl.lr_scheduler.CosineAnnealingScheduler(warmup_steps=4, constant_steps=0, min_lr=1e-4),
    )
    transform = llm.peft.LoRA(dim=8, dropout=0.1) if peft else None
    return llm.GPTModel(config, optim=optimizer, model_transform=transform), [transform] if transform else []


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peft", action="store_true", help="train LoRA adapters, with the model itself frozen")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--logs", default="nemo_logs")
    args = parser.parse_args()

    gpt, callbacks = model(args.peft)
    trainer = nl.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        strategy=nl.MegatronStrategy(
            tensor_model_parallel_size=args.tensor_parallel,
            num_distributed_optimizer_instances=2,
            ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            ckpt_async_save=False,
        ),
        plugins=nl.MegatronMixedPrecision(precision="bf16-mixed"),
        max_steps=args.steps,
        limit_val_batches=4,
        val_check_interval=8,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        logger=CSVLogger(args.logs, name=""),
        callbacks=callbacks,
    )
    trainer.fit(gpt, Data(args.steps))
    print(f"loss {trainer.callback_metrics['reduced_train_loss']:.4f}")
