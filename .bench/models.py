"""Times training and inference of real models before and after replace_layer_norm, eager and under torch.compile.

    python .bench/models.py             prints a table, and writes it to .bench/RESULTS.md (5 minutes)
    python .bench/models.py vit         only the models whose names contain "vit"; writes nothing

A training step is forward and backward, without an optimizer. Five steps in a row are timed. Models have random weights.
There are three runs, each with new models (torch.compile's are kept), which are timed in turns. The table has the run
with the median gain. The spread is the largest distance of another run's gain from it. A gain is "no change" if it is
less than the spread or 1%. A model whose package (transformers, timm) is not installed is skipped with a message.
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

from layernorm_inline import LayerNorm, replace_layer_norm  # noqa: E402
from test_layernorm_inline import milliseconds, versions  # noqa: E402


class TriangleMultiplication(nn.Module):
    """Updates each pair (i, j) from the pairs (i, k) and (j, k) or, if not outgoing, from (k, i) and (k, j)."""

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
    """Gated attention within each row of pairs or, if not starting, within each column."""

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
    """Blocks that update a pair tensor (n, n, c) like those of AlphaFold, without bias terms and dropout.

    Each block has 7 layer norms.
    """

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


def gpt_2(batch=8, length=1024, device="cuda", dtype=torch.float32, **config):
    """Returns GPT-2 with parameters of `dtype`, which runs under bf16 autocast if that is float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **config)).to(device, dtype).train()
    ids = torch.randint(model.config.vocab_size, (batch, length), device=device)

    def loss(model):
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.float32):
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


# name: (required package, input, precision, function that returns a model with random weights and its loss function)
REAL_MODELS = {
    "GPT-2 124M": ("transformers", "8 x 1024 tokens", "autocast bf16", gpt_2),
    "GPT-2 124M, parameters in bf16": (
        "transformers",
        "8 x 1024 tokens",
        "bf16",
        functools.partial(gpt_2, dtype=torch.bfloat16),
    ),
    "ViT-B/16": (
        "timm",
        "128 images of 224 x 224",
        "autocast bf16",
        functools.partial(timm_model, "vit_base_patch16_224"),
    ),
    "ConvNeXt-S": (
        "timm",
        "128 images of 224 x 224",
        "autocast bf16",
        functools.partial(timm_model, "convnext_small"),
    ),
    "AlphaFold-like pair blocks": ("torch", "512 x 512 x 128", "bf16", functools.partial(pair_stack, 512)),
}
RUNS = 3


def with_replaced_norms(original):
    # nn.LayerNorm, and timm's subclass of that name, which computes the same function.
    types = {type(m) for m in original.modules() if type(m).__name__ == "LayerNorm"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table shows how many were replaced
        return replace_layer_norm(copy.deepcopy(original), types)


def steps_of(model, loss):
    """Returns two functions, which run five training steps and five steps of inference.

    Five, so that the host runs ahead of the GPU, as in training. Then they wait, so that the next run starts with an
    idle GPU.
    """

    def train():
        for _ in range(5):
            value = loss(model)
            value.backward()
            model.zero_grad(set_to_none=True)
        value.item()

    def infer():
        with torch.no_grad():
            for _ in range(5):
                value = loss(model)
        value.item()

    return train, infer


def time_model(make):
    """Returns (number of replaced norms, number of all norms, {step: [(original, replaced) ms of each run]})."""
    compiled, times = {}, {}
    for run in range(RUNS):
        torch.manual_seed(0)
        original, loss = make()
        replaced = with_replaced_norms(original)
        pairs = {"": zip(steps_of(original, loss), steps_of(replaced, loss))}
        if run == 0:
            torch.testing.assert_close(loss(replaced), loss(original), atol=1e-2, rtol=1e-2)
            norms = [type(m) is LayerNorm for m in replaced.modules() if isinstance(m, nn.LayerNorm)]
            torch._dynamo.reset()
            pairs[", compiled"] = zip(*(steps_of(torch.compile(model), loss) for model in (original, replaced)))
        steps = {what + kind: pair for kind in pairs for what, pair in zip(("training", "inference"), pairs[kind])}
        compiled = compiled or {step: pair for step, pair in steps.items() if "compiled" in step}
        steps.update(compiled)
        runs = {(step, model): pair[model] for step, pair in steps.items() for model in (0, 1)}
        ms = milliseconds(runs, repeats=3, warm_up=2)
        for step in steps:
            times.setdefault(step, []).append((ms[step, 0] / 5, ms[step, 1] / 5))
    return sum(norms), len(norms), times


def median_run(times):
    """Returns the table's last cells: the ms of the run with the median gain, this gain, and the spread.

    times: (original, replaced) ms of each run, whose number is odd.
    """
    runs = sorted((original / replaced, original, replaced) for original, replaced in times)
    gain, original, replaced = runs[len(runs) // 2]
    spread = max(abs(quotient - gain) for quotient, *_ in runs)
    is_change = abs(gain - 1) > max(spread, 0.01)
    return f"{original:.2f}", f"{replaced:.2f}", f"{gain:.2f}" if is_change else "no change", f"{spread:.3f}"


def models_named(words):
    """Returns the names in REAL_MODELS that contain one of `words`, ignoring case, or all names if `words` is empty."""
    return [name for name in REAL_MODELS if not words or any(word.lower() in name.lower() for word in words)]


COLUMNS = ["model", "step", "input", "precision", "norms", "nn.LayerNorm, ms", "layernorm_inline, ms", "gain", "spread"]


def time_models(names):
    """Prints the rows of each model, and returns the table as Markdown."""
    print(versions(), "; ".join(COLUMNS), sep="\n")
    rows = []
    for name in names:
        package, size, precision, make = REAL_MODELS[name]
        if importlib.util.find_spec(package) is None:
            print(f"{name}: skipped, because {package} is not installed")
            continue
        replaced, norms, times = time_model(make)
        torch.cuda.empty_cache()
        for step, runs in times.items():
            rows.append([name, step, size, precision, f"{replaced} of {norms}", *median_run(runs)])
            print("; ".join(rows[-1]), flush=True)
    text = f"Milliseconds per step: of {RUNS} runs, the one with the median gain. "
    text += (
        "The spread is the largest distance of another run's gain. A gain of less than the spread or 1% is no change."
    )
    return f"{versions()}\n\n{text}\n\n{results.markdown_table(COLUMNS, rows)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"parts of {'; '.join(REAL_MODELS)}")
    words = parser.parse_args().names
    for word in words:
        if not models_named([word]):
            parser.error(f"no model name contains {word!r}. The names are: {'; '.join(REAL_MODELS)}")
    if not torch.cuda.is_available():
        print("Nothing was timed, because there is no CUDA GPU.")
        return 1
    table = time_models(models_named(words))
    if not words:  # a partial table is not written
        results.write_section(f"Models, {torch.cuda.get_device_name()}", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
