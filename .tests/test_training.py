"""Training as with nn.LayerNorm: losses of whole networks, and on two GPUs (DistributedDataParallel, FSDP2)."""

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
    """Losses of some steps of Adam on random but fixed batches. batches: list of (input, target)."""
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
    """LayerNorm that rounds elsewhere: what remains of two such runs' difference is noise."""

    def forward(self, x):
        mean = x.mean(tuple(range(-len(self.normalized_shape), 0)), keepdim=True)
        distance = x - mean
        variance = distance.square().mean(tuple(range(-len(self.normalized_shape), 0)), keepdim=True)
        return distance / (variance + self.eps).sqrt() * self.weight + self.bias


def with_other_order(model):
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


# Networks and steps in which rounding errors do not grow: losses differ by some 2e-7. With ReLU, whose derivative jumps,
# it can be 3e-5, and later more; after 270 steps the convnet's loss is 1e-11, and what Adam then divides by their own
# size are gradients that consist of rounding errors.
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
@pytest.mark.parametrize("make,shape,target", [
    (transformer, (16, 24, 64), (16, 24, 4)), (ConvNet, (16, 3, 32, 32), (16, 4)),
    (conv_model, (2, 32, 3, 5, 32), (2, 64, 6, 10, 64)),
], ids=["transformer", "convnet", "problem 34"])  # fmt: skip
def test_training_follows_pytorch(backend, make, shape, target):
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
        theirs = train(model, batches, 60)
        noise = (train(model, batches, 60, with_other_order) - theirs).abs().max()
        difference = (train(model, batches, 60, replace) - theirs).abs().max()
    assert theirs[-1] < 0.9 * theirs[0], "it learns"
    assert difference <= 5 * noise + 1e-6, f"differs by {difference:.2e}, noise is {noise:.2e}"


DISTRIBUTED = """
    import os, sys, copy, torch
    from torch import nn
    import torch.distributed as dist
    from layernorm_inline import LayerNorm, replace_layer_norm

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    kind = sys.argv[1]

    def losses(replace):
        torch.manual_seed(0)
        model = nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]).cuda()
        if replace:
            replace_layer_norm(model)
            assert sum(type(m) is LayerNorm for m in model.modules()) == 3
        if kind == "ddp":
            model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
        else:
            from torch.distributed.fsdp import fully_shard
            for m in model:
                if isinstance(m, (nn.Linear, nn.LayerNorm)):
                    fully_shard(m)
            fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        torch.manual_seed(rank + 1)
        x, target = torch.randn(32, 64, device="cuda"), torch.randn(32, 64, device="cuda")
        result = []
        for _ in range(30):
            loss = nn.functional.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            result.append(loss.detach())
        return torch.stack(result)

    theirs, ours = losses(False), losses(True)
    assert theirs[-1] < theirs[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    dist.destroy_process_group()
    print("agree")
"""


@two_gpus
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_distributed_training(kind, tmp_path):
    shutil.copy(SOURCE, tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(DISTRIBUTED))
    port = str(29500 + os.getpid() % 2000)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    environment = environment_with(TORCH_EXTENSIONS_DIR=str(tmp_path / "cache"))
    done = run([*command, "train.py", kind], cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agree") == 2
