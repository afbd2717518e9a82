"""
Programs of Lightning and accelerate on two processes without GPUs, with the flag and without. CI installs neither:
pip install --no-deps lightning pytorch-lightning accelerate lightning-utilities torchmetrics, and what they import.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest


COMMON = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def new_model():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(3)]
    for block in blocks:
        block.compile()
    return nn.Sequential(*blocks)


tokens = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
data = DataLoader(TensorDataset(tokens), batch_size=8)
losses = []
"""

LIGHTNING = (
    COMMON
    + """
import lightning
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

shards = sys.argv[1] == "fsdp2"


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = new_model()

    def configure_model(self):
        if shards:
            for module in (*self.net, self.net):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, _):
        (x,) = batch
        loss = (self.net(x) - x).square().mean()
        losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
strategy = "ddp"
if shards:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, accumulate_grad_batches=2, **options
)
trainer.fit(Module(), data)
if trainer.global_rank == 0:
    print("losses", *losses)
"""
)

# Without a GPU, its FSDP is DDP.
ACCELERATE = (
    COMMON
    + """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
net = new_model()
net, optimizer, data = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), data)
for _ in range(2):
    for (x,) in data:
        with accelerator.accumulate(net):
            loss = (net(x) - x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
if accelerator.is_main_process:
    print("losses", *losses)
accelerator.end_training()
"""
)


@pytest.mark.parametrize(
    "framework, source, shards",
    [("lightning", LIGHTNING, "ddp"), ("lightning", LIGHTNING, "fsdp2"), ("accelerate", ACCELERATE, "ddp")],
    ids=["lightning_ddp", "lightning_fsdp2", "accelerate_ddp"],
)
def test_losses(framework, source, shards, tmp_path):
    """They are those without the flag, to the bit."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"requires {framework}")
    program = tmp_path / "train.py"
    program.write_text(source)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = []
    for flag in ("0", "1"):
        env = {**os.environ, "TORCHINDUCTOR_PYGRAPH": flag, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        found = subprocess.run(
            [*command, str(program), shards], env=env, capture_output=True, text=True, timeout=200, check=False
        )
        assert found.returncode == 0, found.stderr[-4000:]
        printed.append(next(line for line in found.stdout.splitlines() if line.startswith("losses")))
    assert printed[0] == printed[1]
    assert len(printed[0].split()) == 9
