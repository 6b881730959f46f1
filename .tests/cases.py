"""The cases that the tests run, and the kernel family that must handle each of them.

On the GPU of the machine and on emulated Hopper GPUs, the cases are every shape with every dtype, plain and in one
other form. For every pair of kernel families, one for forward and one for backward, they are also every form, every
tensor that does not start on a 16-byte boundary, and every kind of weight and bias. If several cases cover the same,
only the smallest is kept.
"""

import typing

import emulator
import pytest
import torch
from reference import AFFINE, LINE_BYTES, random_case

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FORMS = {"plain": (None, 1.0), "gelu": ("gelu", 1.0), "tanh": ("gelu_tanh", -0.5), "scale": (None, 2.0)}
# The tensors that start one element past a cache line: x is input, w weight, b bias, d grad_output.
OFFSETS = ["x", "w", "b", "d", "xwbd"]
MAX_SLICE = 8192  # columns of a row that one block of the pipelined kernels handles
MAX_BLOCKS_PER_ROW = 160  # kMaxBlocksPerRow


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


class Case(typing.NamedTuple):
    """A forward and a backward call. A test id has its name, such as hopper_2-registers-registers-19x33-fp16-tanh."""

    gpu: emulator.Gpu
    rows: int
    cols: int
    dtype: str
    form: str  # a key of FORMS
    off: str = ""  # the tensors that are not aligned: one of OFFSETS, or none
    affine: str = "both"  # the kind of weight and bias: one of reference.AFFINE

    def __str__(self):
        words = (self.forward, self.backward, f"{self.rows}x{self.cols}", self.dtype, self.form, self.off, self.affine)
        return "-".join([str(self.gpu), *(word.replace(" ", "_") for word in words if word not in ("", "both"))])

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
        """The kernel family that must handle the forward call."""
        if self.cols * TYPES[self.dtype].itemsize // 16 <= (2048 if self.has_aligned_rows else 1792):
            return "registers"
        if self.has_aligned_rows and self.form == "plain":
            if self.has_pipelined_kernels(1):
                return "pipelined"
            if self.has_grid_resident_kernel():
                return "grid_resident"
        return "two_pass"

    @property
    def backward(self):
        """The kernel family that must handle the backward call."""
        size = TYPES[self.dtype].itemsize
        in_registers = self.cols <= (16 if size == 2 and self.has_aligned_rows else 8) * 512
        is_long = self.cols * size > 8192 or not in_registers
        if self.has_aligned_rows and self.form == "plain" and is_long and self.has_pipelined_kernels(2):
            return "pipelined"
        return "registers" if in_registers else "two_pass"

    @property
    def has_one_row(self):
        """Then there is only one range of rows, whose sums are the gradients of weight and bias."""
        return self.rows == 1

    @property
    def families(self):
        """Those of both directions, and those of an aligned, plain call of the same shape: what a condition changes."""
        plain = self._replace(form="plain", off="", affine="both")
        return self.forward, self.backward, plain.forward, plain.backward

    def has_pipelined_kernels(self, tensors):
        """Returns True if the pipelined kernels support rows of this length. tensors: 1 for forward, 2 for backward.

        Three stages, each with a block's slice of every tensor, must fit into shared memory beside the reserved bytes,
        which are an estimate: no shape is so close to the longest supported row that one KB matters.
        """
        gpu, reserved = self.gpu, (6 if tensors == 1 else 3) << 10
        stage = (gpu.shared_bytes - reserved) // (3 * tensors) - LINE_BYTES
        longest = min(MAX_SLICE, stage // TYPES[self.dtype].itemsize) * min(gpu.sms, MAX_BLOCKS_PER_ROW)
        return gpu.code >= 80 and not gpu.lacks_cooperative_launches and self.cols <= longest

    def has_grid_resident_kernel(self):
        """Returns True if the SMs together hold a row, and every group of SMs gets at least four rows."""
        gpu = self.gpu
        if gpu.code < 90 or gpu.shared_bytes < 200 << 10 or gpu.lacks_cooperative_launches:
            return False
        groups = min(self.rows, gpu.sms // -(-self.cols // 32768))
        return (self.dtype == "fp32" or "float32" not in self.affine) and groups > 0 and self.rows >= 4 * groups

    @property
    def has_aligned_rows(self):
        """Returns True if every row starts on 16 bytes. The binding copies tensors that do not."""
        return self.cols * TYPES[self.dtype].itemsize % 16 == 0

    def tensors(self, seed=0, **options):
        """Returns random input, weight, bias and grad_output. Options are those of reference.random_case."""
        options.setdefault("device", "cuda" if self.gpu.name == "cuda" else "cpu")
        offsets = tuple(int(letter in self.off) for letter in "xwbd")
        return random_case(self.rows, self.cols, TYPES[self.dtype], self.affine, seed, offsets=offsets, **options)


def this_gpu():
    """Returns a list of the machine's first GPU, or an empty list if the machine has none."""
    if not torch.cuda.is_available():
        return []
    p, (major, minor) = torch.cuda.get_device_properties(0), torch.cuda.get_device_capability()
    shared_bytes = getattr(p, "shared_memory_per_block_optin", 99 << 10)
    return [emulator.Gpu("cuda", p.multi_processor_count, 10 * major + minor, shared_bytes)]


# Two SMs are enough for rows that one block handles. Rows that blocks share need more: 36 SMs, because a row that is
# shared by more than 32 blocks has more blocks than a warp has lanes. The GPU "mps" rejects cooperative launches.
SMS = {"hopper": (2, 8, 36), "ampere": (2, 8), "blackwell": (4,), "ada": (4,), "turing": (2,), "mps": (8,)}
EMULATED = [emulator.GPUS[name](sms) for name in SMS for sms in SMS[name]]
MAX_EMULATED_ELEMENTS = 510_000  # elements of input: a case runs for up to half a second


def pick(words, *key):
    """Returns one of the words. The same key always picks the same word, and different keys spread over all words."""
    return words[sum(map(ord, "".join(map(str, key)))) % len(words)]


def candidates(gpu):
    """Yields (key, case). Cases with the same key cover the same, so that one of them is enough."""
    for rows, cols in shapes(gpu):
        for dtype in TYPES:
            if gpu.lacks_cooperative_launches and cols <= MAX_SLICE:
                continue  # blocks do not share such rows, so that nothing differs from other GPUs
            is_common = gpu.name in ("cuda", "hopper")
            every_shape = is_common and (gpu.sms != 36 or cols > 60_000)
            for form in FORMS:
                case = Case(gpu, rows, cols, dtype, form)
                aligned = case.has_aligned_rows
                yield (gpu.name, *case.families, dtype, form, aligned), case
                if every_shape and form in ("plain", pick(["gelu", "tanh", "scale"], rows, cols)):
                    yield (gpu, rows, cols, dtype, form), case
            if dtype not in ("fp32", "bf16") or cols < 60:
                continue  # too short for a bug in single columns to show
            size = cols * TYPES[dtype].itemsize
            for form in ("plain", "gelu"):
                # Odd row lengths, and three kinds of lengths that would be aligned without the offset: a thread handles
                # a different number of rows of each.
                for off in OFFSETS:
                    case = Case(gpu, rows, cols, dtype, form, off)
                    kind = "odd" if cols % 2 else 512 < size and cols <= 4096 and 1 + (rows > 4 * gpu.sms)
                    if size % 16 == 0 or cols % 2 and form == pick(["plain", "gelu"], off):
                        yield (gpu.name, *case.families, dtype, form, off, kind), case
                for affine in AFFINE[1:] if dtype == "bf16" else AFFINE[1:4]:
                    case = Case(gpu, rows, cols, dtype, form, "", affine)
                    yield (gpu.name, *case.families, dtype, form, affine, case.has_one_row and is_common), case


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

    Some kinds are plain, the others have GELU, if both exist: some kernel families never run an activation.
    """
    by_kind = {}
    for case in cases:
        if case.off or case.affine != "both" or case.cols < 60 or case.elements >= 4 * 10**7:
            continue
        if case.form in ("plain", "gelu"):
            gpu, families, is_many = case.gpu, (case.forward, case.backward), case.rows > 16 * case.gpu.sms
            kind = (gpu.name == "cuda", gpu.code, *families, case.dtype, case.has_aligned_rows, is_many)
            smallest = by_kind.setdefault(kind, {})
            smallest[case.form] = min(case, smallest.get(case.form, case), key=lambda case: case.elements)
    return [smallest[pick(sorted(smallest), *kind)] for kind, smallest in by_kind.items()]


def single_properties(case):
    """Yields (kernel family and direction, value of a property)."""
    for family in (("forward", case.forward), ("backward", case.backward)):
        for covered in ((case.dtype, case.has_aligned_rows), (case.affine,), (case.form,), (case.off,)):
            yield (*family, *covered)


def pairs_of_properties(case):
    """Yields (direction, kernel family, values of two properties)."""
    for direction, family, off, has_one_row in (
        ("forward", case.forward, case.off.replace("d", ""), False),
        ("backward", case.backward, case.off, case.has_one_row),
    ):
        for covered in ((case.form, case.has_aligned_rows), (case.affine, has_one_row), (off, case.dtype)):
            yield direction, family, *covered


def cross_section(cases, properties, given=()):
    """Returns small cases that, together with those given, cover all properties."""
    covers = {case: {*properties(case)} for case in cases}
    missing, chosen = set().union(*covers.values()).difference(*map(properties, given)), []
    while missing:
        chosen.append(max(cases, key=lambda case: len(covers[case] & missing) / (20_000 + case.elements)))
        missing -= covers[chosen[-1]]
    return chosen


CASES = cases_of([*this_gpu(), *EMULATED])
SOME = of_each_kind(CASES)
# The cases that run without --full: on the GPU of the machine, or on an emulated Hopper GPU if it has none. Each of SOME
# is in many tests, so that pairs are covered by others.
ON_ONE_GPU = [case for case in CASES if case.gpu.name == ("cuda" if this_gpu() else "hopper")]
SHORT = cross_section(ON_ONE_GPU, single_properties)
SHORT += cross_section([case for case in ON_ONE_GPU if case not in SOME], pairs_of_properties, SHORT)


def parameters(cases):
    """Returns the decorator for tests with the parameters backend and case."""
    marked = []
    for case in cases:
        is_cuda, full = case.gpu.name == "cuda", [] if case in SHORT else [pytest.mark.full]
        marks = full if is_cuda else [pytest.mark.emulated, *full]
        marked.append(pytest.param("cuda" if is_cuda else "emulated", case, id=str(case), marks=marks))
    return pytest.mark.parametrize("backend,case", marked, indirect=["backend"])


every_case, some_cases = parameters(CASES), parameters(SOME)
