"""The cases that the tests run, and the kernel family that must handle each of them.

A case is a GPU, a shape, a dtype, a form (activation and scale), the tensors that are not aligned, and the kind of
weight and bias. shapes() lists the shapes; forward_family() and backward_family() state the expected kernel families.
All cases follow from these three functions:

    - on the GPU of the machine, and on emulated Hopper GPUs: every shape with every dtype, plain and in one other form
    - for every pair of kernel families, one for forward and one for backward: every form, every tensor that does not
      start on a 16-byte boundary, and every kind of weight and bias

If several cases cover the same, only the smallest is kept. To cover a new activation, add it to FORMS.
"""

import typing

import emulator
import pytest
import torch
from reference import LINE_BYTES, random_case

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FORMS = {"plain": (None, 1.0), "gelu": ("gelu", 1.0), "tanh": ("gelu_tanh", -0.5), "scale": (None, 2.0)}
# The tensors that start one element past a cache line: x is input, w weight, b bias, d grad_output.
OFFSETS = ["x", "w", "b", "d", "xwbd"]
# Which of weight and bias exist. "float32": in float32 even if input has 16 bits; the other kinds have input's dtype.
AFFINES = ["weight", "bias", "none", "float32", "float32 weight", "float32 bias"]
MAX_SLICE = 8192  # columns of a row that one block of the pipelined kernels handles
MAX_BLOCKS_PER_ROW = 160  # kMaxBlocksPerRow


# ---- Shapes ----


def shapes(gpu):
    """Yields (rows, cols). Most shapes are meant for one kernel family, and scale with the number of SMs."""
    s = gpu.sms
    some = s + s // 3 + 1  # more rows than SMs
    long, longer, longest = 1984 * s, 16668 * s, 31776 * s
    yield from ((7, 1), (19, 33), (5, 100), (40, 256), (7, 500), (5, 2041), (3, 2051), (9, 2560), (3, 4099), (9, 4096))
    yield from ((9, 640), (3, 5120))
    # Enough rows that a call of any dtype has more 16-byte loads than all SMs have threads.
    for cols in (9, 41, 64, 65, 255, 320, 768, 1000, 1536, 1999, 2560, 4096):
        yield 18432 * s // cols + 9, cols
    yield from ((some, 6001), (some, 6145), (5, 8192), (some, 8192), (9, 9001), (9, 768), (2 * s, 7001), (4 * s, 13001))
    yield from ((some, 9000), (some, 12288), (some, 16392))
    yield from ((5, 8200), (5, 12288), (3, 16392), (3, 20001), (3, 20008), (some, 24576), (2 * some, 20008), (3, 65536))
    yield from ((5, long), (2, 4 * long - 1), (3, long + 1), (1, 7680 * s))
    yield from ((4, longer), (5, longest), (9, longer), (3, longest), (2, 9088 * s), (2, 9088 * s + 1), (3, 6000))


# ---- The kernel family of a case ----


class Case(typing.NamedTuple):
    """A forward and a backward call.

    str(case) is its name in test ids, such as hopper_2-registers-registers-19x33-fp16-tanh: the GPU with its number of
    SMs, the kernel families of forward and backward, the shape, the dtype, the form, and what differs from the defaults.
    """

    gpu: emulator.Gpu
    rows: int
    cols: int
    dtype: str
    form: str  # a key of FORMS
    off: str = ""  # the tensors that are not aligned: one of OFFSETS, or none
    affine: str = "both"  # the kind of weight and bias: one of AFFINES, or both in the dtype of input

    def __str__(self):
        families = f"{self.forward}-{self.backward}"
        words = (str(self.gpu), families, f"{self.rows}x{self.cols}", self.dtype, self.form, self.off)
        return "-".join(word for word in (*words, self.affine.replace(" ", "_")) if word not in ("", "both"))

    @property
    def epilogue(self):
        return dict(zip(("activation", "scale"), FORMS[self.form]))

    @property
    def elements(self):
        return self.rows * self.cols

    @property
    def nbytes(self):
        """The bytes of GPU memory that a test of the case needs, with PyTorch's and the reference's results."""
        return 20 * self.elements * TYPES[self.dtype].itemsize + (1 << 29)

    @property
    def forward(self):
        return forward_family(self)

    @property
    def backward(self):
        return backward_family(self)

    def aligned(self, letters):
        """Returns True if every row of the given tensors (letters as in OFFSETS) starts on a 16-byte boundary."""
        exists = {"w": "bias" not in self.affine.split() and self.affine != "none", "x": True, "d": True}
        exists["b"] = "weight" not in self.affine.split() and self.affine != "none"
        is_off = any(letter in self.off and exists[letter] for letter in letters)
        return not is_off and self.cols * TYPES[self.dtype].itemsize % 16 == 0

    def tensors(self, seed=0, **options):
        """Returns random input, weight, bias and grad_output. Options are those of reference.random_case."""
        options.setdefault("device", "cuda" if self.gpu.name == "cuda" else "cpu")
        offsets = tuple(int(letter in self.off) for letter in "xwbd")
        return random_case(self.rows, self.cols, TYPES[self.dtype], self.affine, seed, offsets=offsets, **options)


def has_pipelined_kernels(case, tensors):
    """Returns True if the pipelined kernels support rows of this length. tensors: 1 for forward, 2 for backward.

    A block handles one slice of a row, and there is at most one block per SM. Three stages, each with the slice of
    every tensor, must fit into shared memory beside `reserved` bytes. The reserved bytes are an estimate: no shape of
    this file is so close to the longest supported row that one KB matters.
    """
    gpu, reserved = case.gpu, (6 if tensors == 1 else 3) << 10
    stage = (gpu.shared_bytes - reserved) // (3 * tensors) - LINE_BYTES
    slice_ = min(MAX_SLICE, stage // TYPES[case.dtype].itemsize)
    return (
        gpu.code >= 80 and not gpu.lacks_cooperative_launches and case.cols <= slice_ * min(gpu.sms, MAX_BLOCKS_PER_ROW)
    )


def has_grid_resident_kernel(case):
    """Returns True if the SMs together hold a row, and every group of SMs gets at least four rows."""
    gpu = case.gpu
    groups = min(case.rows, gpu.sms // -(-case.cols // 32768))
    is_supported = gpu.code >= 90 and gpu.shared_bytes >= 200 << 10 and not gpu.lacks_cooperative_launches
    is_supported = is_supported and not ("float32" in case.affine and case.dtype != "fp32")
    return is_supported and groups > 0 and case.rows >= 4 * groups


def forward_family(case):
    """Returns the kernel family that must handle the forward call."""
    size, aligned = TYPES[case.dtype].itemsize, case.aligned("xwb")
    if case.cols * size // 16 <= (2048 if aligned else 1792):
        return "registers"
    if aligned and case.form == "plain":
        if has_pipelined_kernels(case, 1):
            return "pipelined"
        if has_grid_resident_kernel(case):
            return "grid_resident"
    return "two_pass"


def backward_family(case):
    """Returns the kernel family that must handle the backward call."""
    size = TYPES[case.dtype].itemsize
    # The binding copies 16-bit input and grad_output if they do not start on a 4-byte boundary.
    aligned = case.aligned(("xd" if size == 4 else "") + ("w" if case.epilogue["activation"] is None else "wb"))
    in_registers = case.cols <= (16 if size == 2 and aligned else 8) * 512
    if (
        aligned
        and case.form == "plain"
        and (case.cols * size > 8192 or not in_registers)
        and has_pipelined_kernels(case, 2)
    ):
        return "pipelined"
    return "registers" if in_registers else "two_pass"


# ---- The cases of each GPU ----


def this_gpu():
    """Returns a list of the machine's first GPU, or an empty list if the machine has none."""
    if not torch.cuda.is_available():
        return []
    p, (major, minor) = torch.cuda.get_device_properties(0), torch.cuda.get_device_capability()
    shared_bytes = getattr(p, "shared_memory_per_block_optin", 99 << 10)
    return [emulator.Gpu("cuda", p.multi_processor_count, 10 * major + minor, shared_bytes)]


# Two SMs are enough for rows that one block handles. Rows that blocks share need more: 36 SMs, because a row that is
# shared by more than 32 blocks has more blocks than a warp has lanes. The GPU "mps" rejects cooperative launches.
EMULATED = [
    emulator.GPUS[name](sms)
    for name, sms in (
        ("hopper", 2), ("hopper", 8), ("hopper", 36), ("ampere", 2), ("ampere", 8), ("blackwell", 4), ("ada", 4),
        ("turing", 2), ("mps", 8),
    )
]  # fmt: skip
MAX_EMULATED_ELEMENTS = 510_000  # elements of input: a case takes up to half a second


def pick(words, *key):
    """Returns one of the words. The same key always picks the same word, and different keys spread over all words."""
    return words[sum(map(ord, "".join(map(str, key)))) % len(words)]


def candidates(gpu):
    """Yields (key, case). Cases with the same key cover the same, so that one of them is enough."""
    for rows, cols in shapes(gpu):
        for dtype in TYPES:
            if gpu.lacks_cooperative_launches and cols <= MAX_SLICE:
                continue  # blocks do not share such rows, so that nothing differs from other GPUs
            every_shape = gpu.name in ("cuda", "hopper") and (gpu.sms != 36 or cols > 60_000)
            for form in FORMS:
                case = Case(gpu, rows, cols, dtype, form)
                aligned = case.aligned("xwb")
                yield (gpu.name, case.forward, case.backward, dtype, form, aligned), case
                if every_shape and form in ("plain", pick(["gelu", "tanh", "scale"], rows, cols)):
                    yield (gpu, rows, cols, dtype, form), case
            if dtype not in ("fp32", "bf16") or cols < 60:
                continue  # too short for a bug in single columns to show
            size = cols * TYPES[dtype].itemsize
            for form in ("plain", "gelu"):
                # Odd row lengths, and lengths that would be aligned without the offset. The latter are of three kinds,
                # because a thread handles a different number of rows of each: few rows of medium length, many such
                # rows, and shorter or longer rows.
                for off in OFFSETS:
                    case = Case(gpu, rows, cols, dtype, form, off)
                    kind = "odd" if cols % 2 else 512 < size and cols <= 4096 and 1 + (rows > 4 * gpu.sms)
                    if size % 16 == 0 or cols % 2 and form == pick(["plain", "gelu"], off):
                        yield (gpu.name, case.forward, case.backward, dtype, form, off, kind), case
                for affine in AFFINES if dtype == "bf16" else AFFINES[:3]:
                    case = Case(gpu, rows, cols, dtype, form, "", affine)
                    yield (gpu.name, case.forward, case.backward, dtype, form, affine), case


def cases_of(gpus):
    """Returns the smallest candidate of each key, without those that are too large to emulate."""
    smallest = {}
    for gpu in gpus:
        for key, case in candidates(gpu):
            if gpu.name == "cuda" or case.elements <= MAX_EMULATED_ELEMENTS:
                smallest[key] = min(case, smallest.get(key, case), key=lambda case: case.elements)
    return list(dict.fromkeys(smallest.values()))


def of_each_kind(cases):
    """Returns the smallest case of each kind: architecture, kernel families, dtype, alignment, and few or many rows.

    These cases have both weight and bias, no offsets, at least 60 columns and fewer than 40 million elements. Some
    kinds are plain, the others have GELU, if both exist: some kernel families never run an activation.
    """
    by_kind = {}
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
        if case.off or case.affine != "both" or case.cols < 60 or case.elements >= 4 * 10**7:
            continue
        if case.form in ("plain", "gelu"):
            smallest = by_kind.setdefault(kind, {})
            smallest[case.form] = min(case, smallest.get(case.form, case), key=lambda case: case.elements)
    return [smallest[pick(sorted(smallest), *kind)] for kind, smallest in by_kind.items()]


def cross_section(cases):
    """Returns a small selection of cases, and prefers small ones.

    Together they have, for each kernel family and direction, every dtype with aligned and with other rows, every kind
    of weight and bias, every form, and every tensor that does not start on a 16-byte boundary.
    """

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
# The names of the cases that run without --full: on the GPU of the machine, or on an emulated Hopper GPU if it has
# none.
SHORT = {str(case) for case in cross_section([c for c in CASES if c.gpu.name == ("cuda" if this_gpu() else "hopper")])}


def parameters(cases):
    """Returns the decorator for tests with the parameters backend and case."""
    marked = []
    for case in cases:
        name, marks = ("cuda", []) if case.gpu.name == "cuda" else ("emulated", [pytest.mark.emulated])
        if str(case) not in SHORT:
            marks = [*marks, pytest.mark.full]
        marked.append(pytest.param(name, case, id=str(case), marks=marks))
    return pytest.mark.parametrize("backend,case", marked, indirect=["backend"])


every_case, some_cases = parameters(CASES), parameters(SOME)
