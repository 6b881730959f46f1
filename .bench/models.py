"""Times a training step of real models, before and after replace_layer_norm, eager and under torch.compile.

    python .bench/models.py             prints a table, and writes it to .bench/RESULTS.md
    python .bench/models.py vit         those whose names contain vit

A step is forward and backward, without an optimizer; five run in a row. Models have random weights; what a model needs
beside torch (transformers, timm) is named where it is not installed.
"""

import argparse
import copy
import functools
import importlib.util
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import results  # noqa: E402

from layernorm_inline import ModelNew, replace_layer_norm  # noqa: E402
from test_layernorm_inline import milliseconds, versions  # noqa: E402


class TriangleMultiplication(nn.Module):
    """Every pair (i, j) from the pairs (i, k) and (j, k); not outgoing: (k, i) and (k, j)."""

    def __init__(self, c, outgoing):
        super().__init__()
        self.equation = "ikc,jkc->ijc" if outgoing else "kic,kjc->ijc"
        self.norm_in, self.norm_out = nn.LayerNorm(c), nn.LayerNorm(c)
        self.values, self.gates = nn.Linear(c, 2 * c), nn.Linear(c, 2 * c)
        self.out, self.out_gate = nn.Linear(c, c), nn.Linear(c, c)

    def forward(self, z):
        x = self.norm_in(z)
        a, b = (self.gates(x).sigmoid() * self.values(x)).chunk(2, dim=-1)
        return self.out_gate(x).sigmoid() * self.out(self.norm_out(torch.einsum(self.equation, a, b)))


class TriangleAttention(nn.Module):
    """Gated attention within each row of pairs; not starting: within each column."""

    def __init__(self, c, starting, heads=4):
        super().__init__()
        self.starting, self.heads = starting, heads
        self.norm = nn.LayerNorm(c)
        self.qkv, self.gate, self.out = nn.Linear(c, 3 * c), nn.Linear(c, c), nn.Linear(c, c)

    def forward(self, z):
        x = self.norm(z if self.starting else z.transpose(0, 1))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        y = self.out(self.gate(x).sigmoid() * y)
        return y if self.starting else y.transpose(0, 1)


class PairStack(nn.Module):
    """Blocks that update a pair tensor (n, n, c) as AlphaFold's do, without its biases and dropout: 7 layer norms each."""

    def __init__(self, blocks=2, c=128):
        super().__init__()
        updates = []
        for _ in range(blocks):
            updates += [TriangleMultiplication(c, outgoing=True), TriangleMultiplication(c, outgoing=False)]
            updates += [TriangleAttention(c, starting=True), TriangleAttention(c, starting=False)]
            updates.append(nn.Sequential(nn.LayerNorm(c), nn.Linear(c, 4 * c), nn.ReLU(), nn.Linear(4 * c, c)))
        self.updates = nn.ModuleList(updates)

    def forward(self, z):
        for update in self.updates:
            z = z + update(z)
        return z


def pair_stack(n, device="cuda"):
    model = PairStack().to(device, torch.bfloat16)
    z = torch.randn(n, n, 128, device=device, dtype=torch.bfloat16)
    return model, lambda model: model(z.detach().requires_grad_()).float().square().mean()


def gpt_2(batch=8, length=1024, device="cuda", **config):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **config)).to(device).train()
    ids = torch.randint(model.config.vocab_size, (batch, length), device=device)

    def loss(model):
        with torch.autocast(device, torch.bfloat16):
            return model(input_ids=ids, labels=ids).loss

    return model, loss


def timm_model(name, batch=128, device="cuda"):
    import timm

    model, images = timm.create_model(name).to(device).train(), torch.randn(batch, 3, 224, 224, device=device)
    labels = torch.randint(1000, (batch,), device=device)

    def loss(model):
        with torch.autocast(device, torch.bfloat16):
            return nn.functional.cross_entropy(model(images), labels)

    return model, loss


# name: (the package that it needs, what makes the model and its loss), all with random weights
REAL_MODELS = {
    "pair stack 256 x 256 x 128, bf16": ("torch", functools.partial(pair_stack, 256)),
    "pair stack 512 x 512 x 128, bf16": ("torch", functools.partial(pair_stack, 512)),
    "GPT-2 124M 8 x 1024, autocast": ("transformers", gpt_2),
    "ViT-B/16 128 images, autocast": ("timm", functools.partial(timm_model, "vit_base_patch16_224")),
    "ConvNeXt-S 128 images, autocast": ("timm", functools.partial(timm_model, "convnext_small")),
}


def model_row(make):
    """Times forward and backward. Returns (layer norms replaced, of how many, a list of milliseconds: as it is,
    replaced, both under torch.compile)."""
    torch.manual_seed(0)
    original, loss = make()
    # nn.LayerNorm, and timm's class of that name, which computes the same.
    types = {type(m) for m in original.modules() if type(m).__name__ == "LayerNorm"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table says how many were replaced
        ours = replace_layer_norm(copy.deepcopy(original), types)
    norms = [type(m) is ModelNew for m in ours.modules() if isinstance(m, nn.LayerNorm)]
    torch.testing.assert_close(loss(ours), loss(original), atol=1e-2, rtol=1e-2)
    torch._dynamo.reset()
    steps = {}
    for model, compiled in ((original, False), (ours, False), (original, True), (ours, True)):
        network = torch.compile(model) if compiled else model

        def five_steps(model=model, network=network):  # the host may be ahead of the GPU, as in training
            for _ in range(5):
                value = loss(network)
                value.backward()
                model.zero_grad(set_to_none=True)
            value.item()  # waits, so that what ran before has no part in it

        steps[model, compiled] = five_steps
    times = milliseconds(steps, repeats=8)
    return sum(norms), len(norms), [ms / 5 for ms in times.values()]


def models_named(words):
    """The names in REAL_MODELS that contain one of words, in whatever case; all of them where there are no words."""
    return [name for name in REAL_MODELS if not words or any(word.lower() in name.lower() for word in words)]


COLUMNS = ["model", "norms", "eager", "replaced", "torch.compile", "torch.compile of the replaced"]


def time_models(names):
    """Prints a row for each model; returns the table as Markdown."""
    print(versions())
    print(f"forward and backward, ms: {', '.join(COLUMNS)}")
    rows = []
    for name in names:
        package, make = REAL_MODELS[name]
        if importlib.util.find_spec(package) is None:
            print(f"{name:34} left out: {package} is not installed")
            continue
        replaced, norms, times = model_row(make)
        torch.cuda.empty_cache()
        rows.append([name, f"{replaced}/{norms}", *(f"{ms:.2f}" for ms in times)])
        print(f"{name:34} {rows[-1][1]:>7} " + " ".join(f"{ms:10.2f}" for ms in times), flush=True)
    return f"{versions()}\n\nForward and backward, ms of one step of five.\n\n{results.markdown_table(COLUMNS, rows)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"parts of {'; '.join(REAL_MODELS)}")
    words = parser.parse_args().names
    for word in words:
        if not models_named([word]):
            parser.error(f"no name contains {word!r}; there are: {'; '.join(REAL_MODELS)}")
    if not torch.cuda.is_available():
        print("Nothing was timed: there is no CUDA GPU.")
        return 1
    table = time_models(models_named(words))
    if not words:  # the whole table only
        results.write_section(f"Models, {torch.cuda.get_device_name()}", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
