"""A classifier of handwritten digits in PyTorch Lightning, with nothing that protects it."""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(LightningModule):
    """A small convolutional network for images of 8 by 8 pixels."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 10),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(dim=1) == labels).float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loaders():
    """Three quarters of the images that scikit-learn ships for training, the rest for validation."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    data = TensorDataset(images, labels)
    training, validation = torch.utils.data.random_split(data, [0.75, 0.25], torch.Generator().manual_seed(0))
    return DataLoader(training, batch_size=32, shuffle=True), DataLoader(validation, batch_size=32)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--logs", default="lightning_logs")
    args = parser.parse_args()

    seed_everything(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="ddp",
        max_epochs=args.epochs,
        log_every_n_steps=1,
        logger=CSVLogger(args.logs, name=""),
        callbacks=[ModelCheckpoint(monitor="accuracy", mode="max")],
    )
    trainer.fit(Digits(), *loaders())
    print(f"accuracy {trainer.callback_metrics['accuracy']:.4f}")
