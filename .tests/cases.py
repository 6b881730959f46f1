"""The table of cases: which shapes, on which GPUs, in which forms, and which rooms take them.

SHAPES and forward_room, backward_room are all that names a room or a length. From them follow the cases: of each GPU
every shape and dtype; of every pair of rooms (forward and backward) each form, each tensor that begins off a 16-byte
boundary, and each kind of weight and bias. An activation that is added to FORMS needs no other line in this file.
"""

import typing

import emulator
import pytest
import torch
from reference import LINE_BYTES, random_case

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FORMS = {"plain": (None, 1.0), "gelu": ("gelu", 1.0), "tanh": ("gelu_tanh", -0.5), "scale": (None, 2.0)}
OFFSETS = ["x", "w", "b", "d", "xwbd"]  # begin an element past a cache line: input, weight, bias, grad_output
AFFINES = ["weight", "bias", "none", "float32", "float32 weight", "float32 bias"]
SLICE = 8192  # columns of a row that a block of the pipeline has, at most


# ---- Shapes ----


def shapes(gpu):
    """(rows, cols), most of them for one room, from the number of SMs and, for kernels whose blocks wait for one
    another, from what an SM holds."""
    s = gpu.sms
    some, most_shared = s + s // 3 + 1, 15 * s + 1
    long, longer, longest = 1984 * s, 16668 * s, 31776 * s
    yield from ((7, 1), (19, 33), (5, 100), (40, 256), (7, 500), (5, 2041), (3, 2051), (9, 2560), (3, 4099), (9, 4096))
    yield from ((9, 640), (3, 5120))
    # More loads of 16 bytes than SMs have threads.
    for cols in (9, 41, 64, 65, 255, 320, 768, 1000, 1536, 1999, 2560, 4096):
        yield 18432 * s // cols + 9, cols
    yield from ((some, 6001), (some, 6145), (5, 8192), (some, 8192), (9, 9001), (9, 768), (2 * s, 7001), (4 * s, 13001))
    yield from ((some, 9000), (most_shared, 9000), (most_shared, 12288), (some, 16392), (most_shared, 16392))
    yield from ((5, 8200), (5, 12288), (3, 16392), (3, 20001), (3, 20008), (some, 24576), (2 * some, 20008), (3, 65536))
    yield from ((5, long), (2, 4 * long - 1), (3, long + 1), (1, 7680 * s))
    yield from ((4, longer), (5, longest), (9, longer), (3, longest), (2, 9088 * s), (2, 9088 * s + 1), (3, 6000))


# ---- Rooms ----


class Case(typing.NamedTuple):
    gpu: emulator.Gpu
    rows: int
    cols: int
    dtype: str
    form: str
    off: str = ""
    affine: str = "both"

    def __str__(self):
        rooms = f"{self.forward}-{self.backward}"
        words = (str(self.gpu), rooms, f"{self.rows}x{self.cols}", self.dtype, self.form, self.off)
        return "-".join(word for word in (*words, self.affine.replace(" ", "_")) if word not in ("", "both"))

    @property
    def epilogue(self):
        return dict(zip(("activation", "scale"), FORMS[self.form]))

    @property
    def elements(self):
        return self.rows * self.cols

    @property
    def nbytes(self):
        """Of memory that a test of it needs, with PyTorch's run beside ours, float64's and the poison."""
        return 20 * self.elements * TYPES[self.dtype].itemsize + (1 << 29)

    @property
    def forward(self):
        return forward_room(self)

    @property
    def backward(self):
        return backward_room(self)

    def aligned(self, letters):
        """Whether each row of the tensors that letters name starts on a 16-byte boundary."""
        there = {"w": "bias" not in self.affine.split() and self.affine != "none", "x": True, "d": True}
        there["b"] = "weight" not in self.affine.split() and self.affine != "none"
        starts = not any(letter in self.off and there[letter] for letter in letters)
        return starts and self.cols * TYPES[self.dtype].itemsize % 16 == 0

    def tensors(self, seed=0, **options):
        """input, weight, bias, grad_output."""
        options.setdefault("device", "cuda" if self.gpu.name == "cuda" else "cpu")
        offsets = tuple(int(letter in self.off) for letter in "xwbd")
        return random_case(self.rows, self.cols, TYPES[self.dtype], self.affine, seed, offsets=offsets, **options)


def has_pipeline(case, tensors):
    """Whether the pipeline takes rows of this length: slices of which three stages fit a block, beside what it keeps,
    one for each SM. (No shape of the table is so near the longest one that a KB decides.)"""
    gpu, kept = case.gpu, (6 if tensors == 1 else 3) << 10
    stage = (gpu.shared_bytes - kept) // (3 * tensors) - LINE_BYTES
    slice_ = min(SLICE, stage // TYPES[case.dtype].itemsize)
    return gpu.code >= 80 and not gpu.refuses and case.cols <= slice_ * min(gpu.sms, 160)


def is_shared(case, size):
    gpu, row_bytes = case.gpu, case.cols * size
    fits = row_bytes <= (43 if size == 2 else 71) << 10 and 2 * (row_bytes + 2048) <= gpu.shared_bytes
    return gpu.code >= 80 and fits and case.rows >= 15 * gpu.sms


def is_joint(case):
    gpu = case.gpu
    groups = min(case.rows, gpu.sms // -(-case.cols // 32768))
    has_room = gpu.code >= 90 and gpu.shared_bytes >= 200 << 10 and not gpu.refuses
    return case.dtype == "fp32" and has_room and groups > 0 and case.rows >= 4 * groups


def forward_room(case):
    size, aligned = TYPES[case.dtype].itemsize, case.aligned("xwb")
    if case.cols * size // 16 <= (2048 if aligned else 1792):
        return "registers"
    if aligned and case.form == "plain":
        if is_shared(case, size):
            return "shared"
        if has_pipeline(case, 1):
            return "pipeline"
        if is_joint(case):
            return "joint"
    return "spread"


def backward_room(case):
    size = TYPES[case.dtype].itemsize
    # The binding clones 16-bit input and grad_output that begin off 4 bytes.
    aligned = case.aligned(("xd" if size == 4 else "") + ("w" if case.epilogue["activation"] is None else "wb"))
    in_registers = case.cols <= (16 if size == 2 and aligned else 8) * 512
    if aligned and case.form == "plain" and (case.cols * size > 8192 or not in_registers) and has_pipeline(case, 2):
        return "pipeline"
    return "registers" if in_registers else "spread"


# ---- GPUs, and their cases ----


def this_gpu():
    """The GPU that is there, or none."""
    if not torch.cuda.is_available():
        return []
    p, (major, minor) = torch.cuda.get_device_properties(0), torch.cuda.get_device_capability()
    shared_bytes = getattr(p, "shared_memory_per_block_optin", 99 << 10)
    return [emulator.Gpu("cuda", p.multi_processor_count, 10 * major + minor, shared_bytes)]


# Two SMs for rows that one block holds, more for rows that several share: 36, more than a warp has lanes.
EMULATED = [
    emulator.GPUS[name](sms)
    for name, sms in (
        ("hopper", 2), ("hopper", 8), ("hopper", 36), ("ampere", 2), ("ampere", 8), ("blackwell", 4), ("ada", 4),
        ("turing", 2), ("refusing", 8),
    )
]  # fmt: skip
MOST_EMULATED = 510_000  # elements of a case: half a second


def rotated(words, *key):
    """One of the words, another for another key."""
    return words[sum(map(ord, "".join(map(str, key)))) % len(words)]


def candidates(gpu):
    """Yields (what it covers, case): of all that cover the same, the smallest will do."""
    for rows, cols in shapes(gpu):
        for dtype in TYPES:
            if gpu.refuses and cols <= SLICE:  # which one block may hold
                continue
            every_shape = gpu.name in ("cuda", "hopper") and (gpu.sms != 36 or cols > 60_000)
            for form in FORMS:
                case = Case(gpu, rows, cols, dtype, form)
                aligned = case.aligned("xwb")
                yield (gpu.name, case.forward, case.backward, dtype, form, aligned), case
                if every_shape and form in ("plain", rotated(["gelu", "tanh", "scale"], rows, cols)):
                    yield (gpu, rows, cols, dtype, form), case
            if dtype not in ("fp32", "bf16") or cols < 60:  # a column alone would show little
                continue
            size = cols * TYPES[dtype].itemsize
            for form in ("plain", "gelu"):
                # Odd rows, and rows that would all be aligned: a thread has several short ones, one long, or two of many.
                for off in OFFSETS:
                    case = Case(gpu, rows, cols, dtype, form, off)
                    kind = "odd" if cols % 2 else 512 < size and cols <= 4096 and 1 + (rows > 4 * gpu.sms)
                    if size % 16 == 0 or cols % 2 and form == rotated(["plain", "gelu"], off):
                        yield (gpu.name, case.forward, case.backward, dtype, form, off, kind), case
                for affine in AFFINES if dtype == "bf16" else AFFINES[:3]:
                    case = Case(gpu, rows, cols, dtype, form, "", affine)
                    yield (gpu.name, case.forward, case.backward, dtype, form, affine), case


def cases_of(gpus):
    smallest = {}
    for gpu in gpus:
        for covers, case in candidates(gpu):
            if gpu.name == "cuda" or case.elements <= MOST_EMULATED:
                smallest[covers] = min(case, smallest.get(covers, case), key=lambda case: case.elements)
    return list(dict.fromkeys(smallest.values()))


def of_each_kind(cases):
    """Of all cases that the same rooms take in the same way, the smallest of some length; plain and not in turns."""
    smallest = {}
    for case in cases:
        kind = (
            case.gpu.name == "cuda",
            case.gpu.code,
            case.forward,
            case.backward,
            case.dtype,
            case.aligned("x"),
            case.rows > 16 * case.gpu.sms,
        )
        if case.off or case.affine != "both" or case.cols < 60 or case.form != rotated(["plain", "gelu"], *kind):
            continue
        smallest[kind] = min(case, smallest.get(kind, case), key=lambda case: case.elements)
    return [case for case in smallest.values() if case.elements < 4 * 10**7]


def cross_section(cases):
    """Returns few and small cases which together have, for each kernel family and direction, every dtype with aligned and
    with other rows, every kind of weight and bias, every form, and every tensor that begins off a 16-byte boundary."""

    def covered_by(case):
        for direction in ("forward", "backward"):
            family = getattr(case, direction)
            yield from ((direction, family, case.dtype, case.aligned("xwb")), (direction, family, case.affine))
            yield from ((direction, family, case.form), (direction, family, case.off))

    covers = {case: set(covered_by(case)) for case in cases}
    missing, chosen = set().union(*covers.values()), []
    while missing:
        chosen.append(max(cases, key=lambda case: len(covers[case] & missing) / (20_000 + case.elements)))
        missing -= covers[chosen[-1]]
    return chosen


CASES = cases_of([*this_gpu(), *EMULATED])
SOME = of_each_kind(CASES)
# Those that run without --full: on the GPU that is there, or on an emulated Hopper GPU.
SHORT = {str(case) for case in cross_section([c for c in CASES if c.gpu.name == ("cuda" if this_gpu() else "hopper")])}


def parameters(cases):
    """Returns the decorator for tests of backend and case."""
    marked = []
    for case in cases:
        name, marks = ("cuda", []) if case.gpu.name == "cuda" else ("emulated", [pytest.mark.emulated])
        if str(case) not in SHORT:
            marks = [*marks, pytest.mark.full]
        marked.append(pytest.param(name, case, id=str(case), marks=marks))
    return pytest.mark.parametrize("backend,case", marked, indirect=["backend"])


every_case, some_cases = parameters(CASES), parameters(SOME)
