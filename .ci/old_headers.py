"""Compiles the bindings with the headers of the oldest PyTorch that README promises to support.

Only checks the syntax, and needs no GPU.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

OLDEST = "2.0.1"

sys.path.insert(0, str(Path(__file__).parent.parent))
import layernorm_inline  # noqa: E402

with tempfile.TemporaryDirectory() as folder:
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*download, "--python-version", "3.11", "--dest", folder, f"torch=={OLDEST}"], check=True)
    (wheel,) = Path(folder).glob("torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith("torch/include/")])
    wheel.unlink()
    source, include = Path(folder, "binding.cpp"), Path(folder, "torch", "include")
    cuda_home, _ = layernorm_inline._find_cuda_home()
    includes = [include, include / "torch/csrc/api/include", Path(cuda_home, "include")]
    flags = ["-std=c++17", "-fsyntax-only", "-D_GLIBCXX_USE_CXX11_ABI=0", "-DTORCH_EXTENSION_NAME=layernorm_inline"]
    for library in (layernorm_inline._EPILOGUE, layernorm_inline._CONVOLUTION):  # the first has what _LAYER_NORM has
        source.write_text('#define LAYERNORM_COMPILED_FOR "nothing"\n' + library.cpp_source)
        command = ["g++", *flags, *library.macros, *(f"-I{i}" for i in includes), str(source)]
        subprocess.run(command, check=True)
print(f"The bindings compile against the headers of PyTorch {OLDEST}")
