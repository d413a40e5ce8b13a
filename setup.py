"""The build of what pyproject.toml cannot describe: the compiled kernels.

They are optional. Without a C++17 compiler, or where the compilation fails, the package installs without them and says
so; MEGATRON_CC_BUILD=require makes that an error, MEGATRON_CC_BUILD=skip leaves them out. The CUDA kernels are built
where torch is a CUDA build and nvcc is found; where that fails, those for CPUs alone.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup

SOURCES = Path("megatron") / "kernels" / "csrc"
ARCHITECTURES = ("80", "90", "100")
WARNING = "warning: the kernels were not compiled, pure torch takes their place: "
WARNING_OF_CUDA = "warning: the kernels were not compiled for GPUs, those for CPUs follow: "
TARGET = "0x020b000000000000"
"""Oldest torch whose stable ABI the binding asks for: 2.11."""

CPU_FLAGS = ["-std=c++17", "-O3", "-fopenmp", "-fvisibility=hidden"]
# The same bits on every processor and in the reference implementations: no fused multiply-add, no reordering of sums.
CPU_FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
CUDA_FLAGS = ["-std=c++17", "-O3", "--fmad=false", "-Xcompiler=-fPIC,-fvisibility=hidden"]


def gencode_flags() -> list[str]:
    """Machine code for the supported architectures, and PTX of the newest for later ones."""
    flags = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    return [*flags, f"-gencode=arch=compute_{ARCHITECTURES[-1]},code=compute_{ARCHITECTURES[-1]}"]


def sources_digest(folder: Path) -> int:
    """60 bits that change with any of the kernels' sources; a library that has others is not used."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return int.from_bytes(digest.digest()[:8], "little") >> 4


def has_cuda() -> bool:
    """Whether the CUDA kernels can be built: a CUDA build of torch, and nvcc."""
    import torch
    from torch.utils import cpp_extension

    return torch.version.cuda is not None and cpp_extension.CUDA_HOME is not None


def extension(cuda: bool) -> Extension:
    """The kernels: portable C++ for each instruction set, plain CUDA, and a binding over torch's stable ABI."""
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    sources = [str(path) for path in sorted([*SOURCES.glob("*.cpp"), *(SOURCES / "cpu").glob("*.cpp")])]
    macros = [("TORCH_TARGET_VERSION", TARGET), ("MCC_SOURCES", f"{sources_digest(SOURCES)}ll")]
    macros += [("MCC_CUDA", "1"), ("USE_CUDA", "1")] if cuda else []
    flags: Any = CPU_FLAGS
    if cuda:
        sources += [str(path) for path in sorted((SOURCES / "cuda").glob("*.cu"))]
        flags = {"cxx": CPU_FLAGS, "nvcc": [*CUDA_FLAGS, *gencode_flags()]}
    made: Extension = (CUDAExtension if cuda else CppExtension)(
        "megatron.kernels._native",
        sources,
        define_macros=macros,
        extra_compile_args=flags,
        extra_link_args=["-fopenmp", "-s"],
        py_limited_api=True,
    )
    return made


def builder(cuda: bool) -> type:
    """torch's build command, which gives up on CUDA's kernels, then on all of them, instead of on the installation."""
    from torch.utils.cpp_extension import BuildExtension

    class Build(BuildExtension):
        extensions: list[Extension]
        compiler: Any
        inplace: bool

        def run(self) -> None:
            given = self.compiler, self.inplace  # which a run changes, and leaves so when it fails
            for with_cuda in (True, False) if cuda else (False,):
                self.compiler, self.inplace = given
                if cuda and not with_cuda:
                    self.extensions[0].__dict__.update(extension(with_cuda).__dict__)
                try:
                    super().run()
                except Exception as error:
                    if os.environ.get("MEGATRON_CC_BUILD") == "require":
                        raise
                    what = WARNING_OF_CUDA if with_cuda else WARNING
                    print(f"{what}{error}", file=sys.stderr)
                else:
                    return
            self.extensions = []  # none that an installation could copy

    return Build


def main() -> None:
    arguments: dict[str, Any] = {}
    try:
        if os.environ.get("MEGATRON_CC_BUILD") != "skip":
            cuda = has_cuda()
            arguments = {"ext_modules": [extension(cuda)], "cmdclass": {"build_ext": builder(cuda)}}
    except ImportError as error:
        if os.environ.get("MEGATRON_CC_BUILD") == "require":
            raise
        print(f"{WARNING}{error}", file=sys.stderr)
    setup(**arguments, options={"bdist_wheel": {"py_limited_api": "cp310"}} if arguments else {})


if __name__ == "__main__":
    main()
