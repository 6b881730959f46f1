"""Tests that networks train as with nn.LayerNorm, on one GPU and on two (DistributedDataParallel,
FSDP1, FSDP2, pipeline parallelism)."""

import copy
import os
import sys
import textwrap
import warnings

import pytest
import torch
from processes import ROOT, environment_with, run
from test_convolution import convolutions_in_tf32
from torch import nn

from test_layernorm_inline import ARGUMENTS_34, Model34

pytestmark = pytest.mark.full


def train(model, batches, changed, steps=60):
    """Trains changed(a copy of the model) with Adam. Returns the loss of each step as float64."""
    model = changed(copy.deepcopy(model))
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-3), []
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
        dims = tuple(range(-len(self.normalized_shape), 0))
        distance = x - x.mean(dims, keepdim=True)
        variance = distance.square().mean(dims, keepdim=True)
        return distance / (variance + self.eps).sqrt() * self.weight + self.bias


def convnet():
    layers = []
    for channels, stride, size in ((3, 1, 32), (16, 2, 16), (16, 2, 8)):
        layers += [nn.Conv2d(channels, 16, 3, stride, padding=1), nn.LayerNorm((16, size, size)), nn.GELU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 8 * 8, 4))


def transformer():
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, activation="gelu", batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.LayerNorm(64), nn.Linear(64, 4))


# Rounding errors do not grow in these networks and in this number of steps. With ReLU, whose derivative jumps, or after
# 270 steps, when the convnet's gradients consist of rounding errors, they would.
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
@pytest.mark.parametrize("make,shape,target", [
    (transformer, (16, 24, 64), (16, 24, 4)), (convnet, (16, 3, 32, 32), (16, 4)),
    (lambda: nn.Sequential(Model34(*ARGUMENTS_34)), (2, 32, 3, 5, 32), (2, 64, 6, 10, 64)),
], ids=["transformer", "convnet", "problem 34"])  # fmt: skip
def test_training_follows_pytorch(backend, make, shape, target):
    def with_other_summation_order(model):
        for module in model.modules():
            if type(module) is nn.LayerNorm:
                module.__class__ = OtherSummationOrder
        return model

    def converted(model):
        backend.replace_layer_norm(model)
        if isinstance(model[0], Model34):
            original, model[0] = model[0], backend.Convolution(*ARGUMENTS_34).to(backend.device)
            model[0].load_state_dict(original.state_dict())
            assert model[0]._in_one_kernel(batches[0][0])
        return model

    torch.manual_seed(0)
    model = make().to(backend.device)
    batches = [[torch.randn(size, device=backend.device) for size in (shape, target)] for _ in range(4)]
    with convolutions_in_tf32(False):
        losses = train(model, batches, lambda model: model)
        noise = (train(model, batches, with_other_summation_order) - losses).abs().max()
        difference = (train(model, batches, converted) - losses).abs().max()
    assert losses[-1] < 0.9 * losses[0], "the loss must decrease"
    assert difference <= 5 * noise + 1e-6, f"the losses differ by {difference:.2e}; rounding causes {noise:.2e}"


DISTRIBUTED = """
    import os, sys, torch
    from torch import nn
    import torch.distributed as dist
    from layernorm_inline import LayerNorm, replace_layer_norm
    from test_training import train

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    kind, mode = sys.argv[1:]

    def distributed(model):
        if kind == "ddp":
            model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
        elif kind == "fsdp1":
            from torch.distributed.fsdp import FullyShardedDataParallel
            from torch.distributed.fsdp.wrap import ModuleWrapPolicy
            each = ModuleWrapPolicy({nn.Linear, nn.LayerNorm})
            model = FullyShardedDataParallel(model, auto_wrap_policy=each, device_id=rank, use_orig_params=True)
        else:
            from torch.distributed.fsdp import fully_shard
            for m in model:
                if isinstance(m, (nn.Linear, nn.LayerNorm)):
                    fully_shard(m)
            fully_shard(model)
        torch._dynamo.reset()
        return torch.compile(model) if mode == "compiled" else model

    def converted(model):
        assert sum(type(m) is LayerNorm for m in replace_layer_norm(model)) == 4
        return distributed(model)

    torch.manual_seed(0)
    layers = []
    for a, b in ((64, 61), (61, 64), (64, 61), (61, 64)):  # compiled, only rows of 61 run this file's kernels
        layers += [nn.Linear(a, b), nn.LayerNorm(b), nn.GELU()]
    model = nn.Sequential(*layers).cuda()
    torch.manual_seed(rank + 1)
    batches = [torch.randn(2, 32, 64, device="cuda")]  # input and target
    losses, expected = (train(model, batches, changed, steps=30) for changed in (converted, distributed))
    assert expected[-1] < expected[0]
    torch.testing.assert_close(losses, expected, atol=1e-4, rtol=1e-4)
    dist.destroy_process_group()
    print("agree")
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_distributed_training_follows_pytorch(kind, mode, tmp_path):
    done = run_in_two_processes(tmp_path, DISTRIBUTED, kind, mode)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agree") == 2


def run_in_two_processes(folder, code, *arguments, **environment):
    script, port = folder / "train.py", str(29500 + os.getpid() % 2000)
    script.write_text(textwrap.dedent(code))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    variables = environment_with(PYTHONPATH=f"{ROOT / '.tests'}:{ROOT}", **environment)
    return run([*command, script, *arguments], env=variables, timeout=300)


# Microbatches go through blocks on two GPUs, and their gradients back. NCCL's kernels wait for the other GPU, so a
# cooperative kernel can wait for SMs on both. signal.alarm ends a process that hangs. Without a GPU, it tries the script.
PIPELINE = """
    import copy, os, signal, sys, torch
    from torch import nn
    import torch.distributed as dist
    from torch.distributed import pipelining
    from layernorm_inline import LayerNorm, replace_layer_norm

    signal.alarm(120)
    rank, cols, rows = int(os.environ["LOCAL_RANK"]), 16384, 512 if torch.cuda.is_available() else 16
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    schedule_class = getattr(pipelining, sys.argv[1])
    is_interleaved = sys.argv[1] != "Schedule1F1B"
    stages = range(rank, 4 if is_interleaved else 2, 2)

    def block():
        return nn.Sequential(nn.LayerNorm(cols), nn.Linear(cols, 32), nn.GELU(), nn.Linear(32, cols), nn.LayerNorm(cols))

    torch.manual_seed(0)
    reference = nn.Sequential(*(block() for _ in range(4 if is_interleaved else 2))).to(device)
    x, target = torch.randn(2, rows, cols).to(device)
    own = [replace_layer_norm(copy.deepcopy(reference[i])) for i in stages]
    assert sum(type(m) is LayerNorm for m in own[0]) == 2
    parts = [pipelining.PipelineStage(m, i, len(reference), device) for m, i in zip(own, stages)]
    options = dict(n_microbatches=8, loss_fn=nn.functional.mse_loss)
    schedule = schedule_class(parts, **options) if is_interleaved else schedule_class(parts[0], **options)
    nn.functional.mse_loss(reference(x), target).backward()
    for step in range(10):
        for module in own:
            module.zero_grad()
        schedule.step(*([x] if rank == 0 else []), **(dict(target=target) if rank == 1 else {}))
    for module, i in zip(own, stages):
        for a, b in zip(module.parameters(), reference[i].parameters()):
            torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-2)
    dist.destroy_process_group()
    print("agree")
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("cooperative", ["0", "1"])
@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"])
def test_pipeline_parallelism_ends(schedule, cooperative, tmp_path):
    if not hasattr(pytest.importorskip("torch.distributed.pipelining"), schedule):
        pytest.skip(f"this PyTorch has no {schedule}")
    done = run_in_two_processes(tmp_path, PIPELINE, schedule, LAYERNORM_INLINE_COOPERATIVE=cooperative)
    if cooperative == "1" and "SIGALRM" in done.stderr:
        warnings.warn(f"{schedule} hangs with cooperative launches", stacklevel=1)  # README says that it can
        return
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agree") == 2
