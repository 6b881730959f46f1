"""Tests that networks train as with nn.LayerNorm, on one GPU and on two (DistributedDataParallel, FSDP2)."""

import copy
import os
import shutil
import sys
import textwrap

import pytest
import torch
from processes import SOURCE, environment_with, run
from test_convolution import convolutions_in_tf32
from torch import nn

from test_layernorm_inline import ARGUMENTS_34, Model34

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

pytestmark = pytest.mark.full


def train(model, batches, steps, replacement=None, rate=1e-3):
    """Trains a copy of the model, changed by `replacement`, with Adam. Returns the loss of each step as float64."""
    model = copy.deepcopy(model)
    if replacement is not None:
        replacement(model)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=rate), []
    for step in range(steps):
        x, target = batches[step % len(batches)]
        loss = nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).double()


class OtherSummationOrder(nn.LayerNorm):
    """An nn.LayerNorm whose results differ only by rounding. Its losses show how large the influence of rounding is."""

    def forward(self, x):
        mean = x.mean(tuple(range(-len(self.normalized_shape), 0)), keepdim=True)
        distance = x - mean
        variance = distance.square().mean(tuple(range(-len(self.normalized_shape), 0)), keepdim=True)
        return distance / (variance + self.eps).sqrt() * self.weight + self.bias


def use_other_summation_order(model):
    for module in model.modules():
        if type(module) is nn.LayerNorm:
            module.__class__ = OtherSummationOrder


class ConvNet(nn.Sequential):
    def __init__(self):
        layers = []
        for i, size in enumerate((32, 16, 8)):
            layers += [nn.Conv2d(3 if i == 0 else 16, 16, 3, stride=1 if i == 0 else 2, padding=1)]
            layers += [nn.LayerNorm((16, size, size)), nn.GELU()]
        super().__init__(*layers, nn.Flatten(), nn.Linear(16 * 8 * 8, 4))


def transformer():
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, activation="gelu", batch_first=True)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.LayerNorm(64), nn.Linear(64, 4)
    )


def conv_model():
    return nn.Sequential(Model34(*ARGUMENTS_34))


# Rounding errors do not grow in these networks and in this number of steps. With ReLU, whose derivative jumps, or after
# 270 steps, when the convnet's gradients consist of rounding errors, they would.
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
@pytest.mark.parametrize("make,shape,target", [
    (transformer, (16, 24, 64), (16, 24, 4)), (ConvNet, (16, 3, 32, 32), (16, 4)),
    (conv_model, (2, 32, 3, 5, 32), (2, 64, 6, 10, 64)),
], ids=["transformer", "convnet", "problem 34"])  # fmt: skip
def test_training_follows_pytorch(backend, make, shape, target):
    """The losses of a converted network differ from the original's by no more than rounding can explain."""

    def replace(model):
        backend.replace_layer_norm(model)
        if isinstance(model[0], Model34):
            original, model[0] = model[0], backend.Convolution(*ARGUMENTS_34).to(backend.device)
            model[0].load_state_dict(original.state_dict())
            assert model[0]._in_one_kernel(batches[0][0])

    torch.manual_seed(0)
    model = make().to(backend.device)
    batches = [
        (torch.randn(shape, device=backend.device), torch.randn(target, device=backend.device)) for _ in range(4)
    ]
    with convolutions_in_tf32(False):
        losses = train(model, batches, 60)
        noise = (train(model, batches, 60, use_other_summation_order) - losses).abs().max()
        difference = (train(model, batches, 60, replace) - losses).abs().max()
    assert losses[-1] < 0.9 * losses[0], "the loss must decrease"
    assert difference <= 5 * noise + 1e-6, f"the losses differ by {difference:.2e}; rounding causes {noise:.2e}"


DISTRIBUTED = """
    import os, sys, copy, torch
    from torch import nn
    import torch.distributed as dist
    from layernorm_inline import LayerNorm, replace_layer_norm

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    kind, mode = sys.argv[1:]

    def train(replace):
        torch.manual_seed(0)
        # Compiled, rows of 64 run PyTorch's layer norm, and rows of 61 this file's kernels.
        sizes = [64, 61, 64, 61, 64]
        layers = [(nn.Linear(a, b), nn.LayerNorm(b), nn.GELU()) for a, b in zip(sizes, sizes[1:])]
        model = nn.Sequential(*[m for layer in layers for m in layer]).cuda()
        if replace:
            replace_layer_norm(model)
            assert sum(type(m) is LayerNorm for m in model.modules()) == 4
        if kind == "ddp":
            model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
        else:
            from torch.distributed.fsdp import fully_shard
            for m in model:
                if isinstance(m, (nn.Linear, nn.LayerNorm)):
                    fully_shard(m)
            fully_shard(model)
        if mode == "compiled":
            torch._dynamo.reset()
            model = torch.compile(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        torch.manual_seed(rank + 1)
        x, target = torch.randn(32, 64, device="cuda"), torch.randn(32, 64, device="cuda")
        losses = []
        for _ in range(30):
            loss = nn.functional.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    original, converted = train(replace=False), train(replace=True)
    assert original[-1] < original[0]
    torch.testing.assert_close(converted, original, atol=1e-4, rtol=1e-4)
    dist.destroy_process_group()
    print("agree")
"""


@pytest.mark.slow
@two_gpus
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_distributed_training_follows_pytorch(kind, mode, tmp_path):
    """With DistributedDataParallel and FSDP2, a converted network has the same losses as the original."""
    shutil.copy(SOURCE, tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(DISTRIBUTED))
    port = str(29500 + os.getpid() % 2000)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    environment = environment_with(TORCH_EXTENSIONS_DIR=str(tmp_path / "cache"))
    done = run([*command, "train.py", kind, mode], cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agree") == 2
