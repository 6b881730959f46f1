"""Times training and inference of real models before and after replace_layer_norm, eager and under torch.compile.

    python .bench/models.py             prints a table, and writes it to .bench/RESULTS.md (6 minutes)
    python .bench/models.py vit         only the models whose names contain "vit"; the other rows stay
    python .bench/models.py --compiled  also compiles the models that are not compiled by default (10 minutes)
    python .bench/models.py --equal     only compares a training of GPT-2 with autocast_output with one without it
    python .bench/models.py --losses    only compares the losses of trainings, and writes them to .bench/RESULTS.md

A training step is forward and backward, without an optimizer. Five steps in a row are timed. Models have random weights.
There are three runs, each with new models (torch.compile's are kept), which are timed in turns. The table has the medians
of the runs. A gain is the quotient of two, and the spread is the median distance of a run's gain from it. A gain is "no
change" if it is less than the spread or 1%. A model whose package (transformers, timm) is not installed is skipped with a
message.

Models under autocast are also timed with autocast_output=True, which all norms have but those in RealModel.others. The
memory of a training step is its peak, without what other models and the input need.
"""

import argparse
import copy
import functools
import importlib.util
import os
import statistics
import sys
import traceback
import warnings
from pathlib import Path
from typing import Callable, NamedTuple

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

    model = timm.create_model(name, drop_path_rate=0).to(device).train()  # the variants must compute the same
    images = torch.randn(batch, 3, 224, 224, device=device)
    labels = torch.randint(1000, (batch,), device=device)

    def loss(model):
        with torch.autocast(device, torch.bfloat16):
            return nn.functional.cross_entropy(model(images), labels)

    return model, loss


def whisper_encoder(batch=32, device="cuda", **config):
    """Returns the encoder of Whisper small, and the mean square of its features of 30 s of sound."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    sizes = dict(d_model=768, encoder_layers=12, encoder_attention_heads=12, encoder_ffn_dim=3072)
    config = WhisperConfig(**{**sizes, **config})
    model = WhisperEncoder(config).to(device).train()
    features = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions, device=device)

    def loss(model):
        with torch.autocast(device, torch.bfloat16):
            return model(features).last_hidden_state.float().square().mean()

    return model, loss


class RealModel(NamedTuple):
    package: str  # that it needs
    input: str
    precision: str
    make: Callable  # returns a model with random weights and its loss function
    others: tuple = ()  # norms without autocast_output: their output is a residual, or leaves autocast
    is_compiled: bool = False  # by default


def image_model(name, batch=128, **options):
    make = functools.partial(timm_model, name, batch)
    return RealModel("timm", f"{batch} images of 224 x 224", "autocast bf16", make, **options)


REAL_MODELS = {
    "GPT-2 124M": RealModel("transformers", "8 x 1024 tokens", "autocast bf16", gpt_2, is_compiled=True),
    "GPT-2 124M, parameters in bf16": RealModel(
        "transformers", "8 x 1024 tokens", "bf16", functools.partial(gpt_2, dtype=torch.bfloat16)
    ),
    "ViT-B/16": image_model("vit_base_patch16_224", is_compiled=True),
    "ConvNeXt-S": image_model("convnext_small"),
    "Swin-T": image_model("swin_tiny_patch4_window7_224", batch=256, others=("patch_embed.norm",)),
    "Whisper small encoder": RealModel(
        "transformers", "32 x 30 s", "autocast bf16", whisper_encoder, others=("layer_norm",)
    ),
    "AlphaFold-like pair blocks": RealModel("torch", "512 x 512 x 128", "bf16", functools.partial(pair_stack, 512)),
}
RUNS = 3


def with_replaced_norms(original, autocast_output=None, others=()):
    # nn.LayerNorm, and timm's subclass of that name, which computes the same function.
    types = {type(m) for m in original.modules() if type(m).__name__ == "LayerNorm"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table shows how many were replaced
        model = replace_layer_norm(copy.deepcopy(original), types, autocast_output=autocast_output)
    for name in others:
        model.get_submodule(name).autocast_output = False
    return model


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


def peak_gib(model, loss):
    """Returns the memory that a training step of the model needs at its peak, its parameters included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    value = loss(model)
    value.backward()
    peak = torch.cuda.max_memory_allocated() - before
    model.zero_grad(set_to_none=True)
    return (peak + sum(p.nbytes for p in model.parameters())) / 2**30


def time_model(real, is_compiled):
    """Returns (number of replaced norms, number of all norms, {step: [ms of each variant] of each run}, GiB).

    The variants are the original model, the replaced one and, under autocast, the replaced one with autocast_output.
    GiB: {step: [memory of each variant]} of the training steps.
    """
    compiled, times, memory = {}, {}, {}
    for run in range(RUNS):
        torch.manual_seed(0)
        original, loss = real.make()
        variants = [original, with_replaced_norms(original)]
        if "autocast" in real.precision:
            variants.append(with_replaced_norms(original, autocast_output=True, others=real.others))
        kinds = {"": variants}
        if run == 0:
            for model in variants[1:]:
                torch.testing.assert_close(loss(model), loss(original), atol=1e-2, rtol=1e-2)
            norms = [type(m) is LayerNorm for m in variants[1].modules() if isinstance(m, nn.LayerNorm)]
            if is_compiled:
                torch._dynamo.reset()
                kinds[", compiled"] = [torch.compile(model) for model in variants]
        steps = {}  # {step: [function of each variant]}
        for kind, models in kinds.items():
            functions = [steps_of(model, loss) for model in models]
            steps["training" + kind], steps["inference" + kind] = zip(*functions)
        compiled = compiled or {step: functions for step, functions in steps.items() if "compiled" in step}
        steps.update(compiled)
        runs = {(step, i): function for step, functions in steps.items() for i, function in enumerate(functions)}
        ms = milliseconds(runs, repeats=3, warm_up=2)
        for step, functions in steps.items():
            times.setdefault(step, []).append([ms[step, i] / 5 for i in range(len(functions))])
        if run == 0:
            memory = {"training" + kind: [peak_gib(model, loss) for model in kinds[kind]] for kind in kinds}
    return sum(norms), len(norms), times, memory


def gain_of(times):
    """Returns cells of the table: the median ms of both kinds of norms, the gain, which is their quotient, and the spread.

    times: (original, replaced) ms of each run.
    """
    original, replaced = (statistics.median(of_kind) for of_kind in zip(*times))
    gain = original / replaced
    spread = statistics.median(abs(before / after - gain) for before, after in times)
    is_change = abs(gain - 1) > max(spread, 0.01)
    return f"{original:.2f}", f"{replaced:.2f}", f"{gain:.2f}" if is_change else "no change", f"{spread:.3f}"


def cells_of(times, memory):
    """Returns the cells of one step: ms, gain and spread by default, the same with autocast_output, and the memory.

    times: [ms of each variant] of each run; memory: GiB of each variant, or None.
    """
    cells = list(gain_of([(original, replaced) for original, replaced, *_ in times]))
    if len(times[0]) == 3:
        cells += gain_of([(original, output) for original, _, output in times])[1:]
    else:
        cells += ["-"] * 3
    memory = [f"{gib:.2f}" for gib in memory or ()]
    return cells + memory + ["-"] * (3 - len(memory))


def models_named(words):
    """Returns the names in REAL_MODELS that contain one of `words`, ignoring case, or all names if `words` is empty."""
    return [name for name in REAL_MODELS if not words or any(word.lower() in name.lower() for word in words)]


COLUMNS = ["model", "step", "input", "precision", "norms", "nn.LayerNorm, ms", "layernorm_inline, ms", "gain", "spread"]
COLUMNS += [
    "autocast_output, ms",
    "gain",
    "spread",
    "nn.LayerNorm, GiB",
    "layernorm_inline, GiB",
    "autocast_output, GiB",
]
LOSSES = ["model", "first loss", "last loss", "layernorm_inline", "autocast_output", "nn.LayerNorm, reversed"]
HEADER = ("model | step", "--- | ---")  # the keys of the first two lines of a table


def as_markdown(rows):
    """Returns the text of the section in RESULTS.md."""
    text = f"Milliseconds per step: medians of {RUNS} runs. A gain is nn.LayerNorm's time divided by the other. The spread "
    text += (
        "is the median distance of a run's gain from it. A gain of less than the spread or 1% is no change. Memory is "
    )
    text += "the peak of a step."
    return f"{versions()}\n\n{text}\n\n{results.markdown_table(COLUMNS, rows)}"


def write_rows(gpu, rows, file=results.FILE):
    """Writes the section in RESULTS.md. Rows of the same models and steps are replaced, and the others stay."""
    table = results.tables_of(file.read_text(), "Models").get(gpu, {})
    kept = {key: [*key.split(" | "), *cells] for key, cells in table.items() if key not in HEADER}
    kept.update({f"{row[0]} | {row[1]}": row for row in rows})
    results.write_section(f"Models, {gpu}", as_markdown(kept.values()), file)


def time_models(names, all_compiled, write):
    """Prints the rows of each model, and calls write(rows) after each. Returns the models that failed."""
    print(versions(), "; ".join(COLUMNS), sep="\n")
    rows, failed = [], []
    for name in names:
        real = REAL_MODELS[name]
        if importlib.util.find_spec(real.package) is None:
            print(f"{name}: skipped, because {real.package} is not installed")
            continue
        try:
            replaced, norms, times, memory = time_model(real, all_compiled or real.is_compiled)
        except Exception:  # the other models are timed all the same
            traceback.print_exc()
            failed.append(name)
            continue
        torch.cuda.empty_cache()
        for step, runs in times.items():
            norms_text = f"{replaced} of {norms}"
            cells = cells_of(runs, memory.get(step))
            rows.append([name, step, real.input, real.precision, norms_text, *cells])
            print("; ".join(rows[-1]), flush=True)
        write(rows)
    return failed


def train(model, losses, lr):
    """Trains the model one step with each loss function, and yields each step's loss and gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for loss in losses:
        value = loss(model)
        value.backward()
        yield [value.detach(), *(p.grad for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def compare_trainings(steps=20, device="cuda", make=gpt_2):
    """Returns the first step, from 1 on, whose loss or gradients differ by a bit with autocast_output, or None.

    In GPT-2, each norm has one consumer, which converts the output by default.
    """
    torch.manual_seed(0)
    config = dict(n_layer=4, n_embd=256, n_head=4, vocab_size=1024, bos_token_id=0, eos_token_id=0)
    original, _ = make(batch=1, length=8, device=device, **config)
    models = [with_replaced_norms(original), with_replaced_norms(original, autocast_output=True)]

    def loss(model, ids):
        with torch.autocast(device, torch.bfloat16):
            return model(input_ids=ids, labels=ids).loss

    batches = torch.randint(config["vocab_size"], (steps, 4, 256), device=device)
    losses = [functools.partial(loss, ids=ids) for ids in batches]
    for step, pair in enumerate(zip(*(train(model, losses, lr=1e-3) for model in models)), 1):
        if not all(torch.equal(*tensors) for tensors in zip(*pair)):
            return step
    return None


def check_equal(steps=20):
    """Prints whether trainings with and without autocast_output are equal. Returns the exit status."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    step = compare_trainings(steps)
    if step is not None:
        print(f"FAILED: with autocast_output, the loss or a gradient of step {step} differs")
        return 1
    print(f"Equal: losses and all gradients of {steps} steps of GPT-2, with and without autocast_output, bit for bit")
    return 0


class ReversedLayerNorm(nn.LayerNorm):
    """Adds up the columns in another order than nn.LayerNorm, so that only rounding differs."""

    def forward(self, x):
        x, weight, bias = (t.flip(-1) for t in (x, self.weight, self.bias))
        return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps).flip(-1)


def with_reversed_norms(original):
    model = copy.deepcopy(original)
    for module in model.modules():
        if type(module).__name__ == "LayerNorm":
            module.__class__ = ReversedLayerNorm
    return model


def losses_of(model, loss, steps):
    """Trains the model with one batch, and returns the losses of all steps."""
    return torch.stack([value for value, *_ in train(model, [loss] * steps, lr=1e-4)]).double()


def compare_losses(real, steps=100):
    """Returns (first loss, last loss, [largest difference from the losses with nn.LayerNorm of each variant])."""
    torch.manual_seed(0)
    original, loss = real.make()
    expected = losses_of(copy.deepcopy(original), loss, steps)
    variants = (
        lambda: with_replaced_norms(original),
        lambda: with_replaced_norms(original, autocast_output=True, others=real.others),
        lambda: with_reversed_norms(original),
    )
    differences = [(losses_of(make(), loss, steps) - expected).abs().max().item() for make in variants]
    return expected[0].item(), expected[-1].item(), differences


def losses_as_markdown(names, steps=100):
    """Compares the losses of models under autocast, prints them, and returns the text of the section in RESULTS.md."""
    rows = []
    for name in names:
        if "autocast" in REAL_MODELS[name].precision:
            first, last, differences = compare_losses(REAL_MODELS[name], steps)
            rows.append([name, f"{first:.3f}", f"{last:.3f}", *(f"{difference:.1e}" for difference in differences)])
            print("; ".join(rows[-1]), flush=True)
    text = f"Largest difference from the losses with nn.LayerNorm in {steps} steps of AdamW with one batch, under bf16 "
    text += "autocast. In the last column, nn.LayerNorm adds up the columns in reverse order."
    return f"{versions()}\n\n{text}\n\n{results.markdown_table(LOSSES, rows)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"parts of {'; '.join(REAL_MODELS)}")
    parser.add_argument("--compiled", action="store_true", help="compile all models, not only some")
    parser.add_argument("--equal", action="store_true", help="only compare two trainings, one with autocast_output")
    parser.add_argument("--losses", action="store_true", help="only compare the losses of trainings")
    arguments = parser.parse_args()
    words = arguments.names
    for word in words:
        if not models_named([word]):
            parser.error(f"no model name contains {word!r}. The names are: {'; '.join(REAL_MODELS)}")
    if not torch.cuda.is_available():
        print("Nothing was timed, because there is no CUDA GPU.")
        return 1
    if arguments.equal:
        return check_equal()
    if arguments.losses:
        text = losses_as_markdown(models_named(words))
        results.write_section(f"Training losses, {torch.cuda.get_device_name()}", text)
        return 0
    write = functools.partial(write_rows, torch.cuda.get_device_name())
    failed = time_models(models_named(words), arguments.compiled, write)
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
