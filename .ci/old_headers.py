"""Compiles CPP_SOURCE with the headers of the oldest PyTorch that README promises to support.

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
    source.write_text('#define LAYERNORM_COMPILED_FOR "nothing"\n' + layernorm_inline.CPP_SOURCE)
    cuda_home, _ = layernorm_inline._find_cuda_home()
    includes = [include, include / "torch/csrc/api/include", Path(cuda_home, "include")]
    flags = ["-std=c++17", "-fsyntax-only", "-D_GLIBCXX_USE_CXX11_ABI=0", "-DTORCH_EXTENSION_NAME=layernorm_inline"]
    flags.append("-DLAYERNORM_HAS_EPILOGUE")  # with this macro, all of CPP_SOURCE is compiled
    subprocess.run(["g++", *flags, *(f"-I{i}" for i in includes), str(source)], check=True)
print(f"CPP_SOURCE compiles against the headers of PyTorch {OLDEST}")
