"""Loading and selection of the compiled kernels, and their registration with torch.compile."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

CHOICE = "MEGATRON_CC_KERNELS"
"""Environment variable: ``reference`` runs without the compiled kernels, ``native`` refuses to run without them."""

_LIBRARY = "megatron_cc"
_KINDS = {"cpu": "CPU", "cuda": "CUDA"}
"""Device types with kernels, and their torch dispatch keys."""
_SOURCES = Path(__file__).parent / "csrc"


def library_path() -> Path | None:
    """Path of the compiled extension beside this file; None if it was not built."""
    libraries = sorted(Path(__file__).parent.glob("_native*.so"))
    return libraries[0] if libraries else None


@functools.cache
def problem() -> str | None:
    """Load the compiled kernels, once.

    Returns:
        None if they are in use, else the reason why not.

    Raises:
        RuntimeError: when ``MEGATRON_CC_KERNELS=native`` is set and they cannot be used.
    """
    choice = os.environ.get(CHOICE, "")
    if choice not in ("", "native", "reference"):
        raise RuntimeError(f"{CHOICE}={choice}: the choices are native and reference")
    why = f"{CHOICE}=reference asks for it" if choice == "reference" else _load()
    if why is not None and choice == "native":
        raise RuntimeError(f"{CHOICE}=native, but {why}")
    return why


def _load() -> str | None:
    path = library_path()
    if path is None:
        return "they were not built: run `pip install -e .` where a C++17 compiler is"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path.name} does not load ({str(error).splitlines()[0]}): run `pip install -e .` again"
    try:
        built = torch.ops.megatron_cc.sources()
    except AttributeError:
        built = None
    if built is None or (_SOURCES.is_dir() and built != sources_digest()):
        return f"{path.name} was compiled from other sources: run `pip install -e .` again"
    # The operators only write to their arguments, as torch.compile must know.
    for name in OPERATORS:
        torch.library.register_fake(f"{_LIBRARY}::{name}", lambda *args, **kwargs: None, allow_override=True)
    # FLOPs from the shapes of the factors, as torch counts its own products.
    products = [operators().product, operators().grouped_product]
    register = register_flop_formula([operator for operator in products if operator not in flop_registry])
    register(lambda a, b, *args, **kwargs: 2 * a[0] * a[1] * b[-1])
    return None


def sources_digest() -> int:
    """60-bit digest of the kernels' sources, as computed by ``setup.py``."""
    digest = hashlib.sha256()
    for path in sorted(path for path in _SOURCES.rglob("*") if path.is_file()):
        digest.update(path.relative_to(_SOURCES).as_posix().encode() + b"\0" + path.read_bytes())
    return int.from_bytes(digest.digest()[:8], "little") >> 4


def kernels_digest() -> str:
    """SHA-256 of the compiled kernels; "python" where they are not in use."""
    path = library_path()
    return "python" if problem() is not None or path is None else hashlib.sha256(path.read_bytes()).hexdigest()


def operators() -> Any:
    """Namespace of the compiled operators."""
    return torch.ops.megatron_cc


def serves(*tensors: Tensor | None) -> bool:
    """Whether the compiled kernels support these tensors: on a device with kernels, and not fp64."""
    present = [t for t in tensors if t is not None]
    on_device = all(problem_on(t.device.type) is None for t in present)
    return on_device and all(t.dtype != torch.float64 for t in present if t.is_floating_point())


def devices() -> frozenset[str]:
    """Device types of this machine that the compiled kernels run on."""
    return frozenset(kind for kind in _KINDS if problem_on(kind) is None)


@functools.cache
def problem_on(kind: str) -> str | None:
    """Check whether the compiled kernels run on this process's device of a type.

    The first call launches a kernel there, so make it while no communication is in progress.

    Returns:
        None if they run, else the reason why not.

    Raises:
        RuntimeError: when ``MEGATRON_CC_KERNELS=native`` is set and they cannot be used.
    """
    why = problem() or _does_not_run(kind)
    if why is not None and os.environ.get(CHOICE) == "native" and kind in _KINDS:
        raise RuntimeError(f"{CHOICE}=native, but {why}")
    return why


def _does_not_run(kind: str) -> str | None:
    if kind == "cuda" and not torch.cuda.is_available():
        return "there is no GPU"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if kind not in _KINDS or not has(f"{_LIBRARY}::quantize_pack", _KINDS[kind]):
        return f"they were built without {kind}: run `pip install -e .` where nvcc and a torch with CUDA are"
    if kind != "cuda":
        return None
    try:
        operators().finite_norm(torch.zeros(1, device=kind), torch.zeros(2, dtype=torch.float64, device=kind))
    except RuntimeError as error:
        major, minor = torch.cuda.get_device_capability()
        return (
            f"they do not run on {torch.cuda.get_device_name()}, compute capability {major}.{minor} "
            f"({str(error).splitlines()[0]}): add it to ARCHITECTURES in setup.py and run `pip install -e .`"
        )
    return None


OPERATORS = (
    "quantize_pack",
    "unpack_dequantize",
    "abs_topk",
    "dilate",
    "gather_packed",
    "scatter_add_packed",
    "finite_norm",
    "sample_histogram",
    "orthonormalize",
    "cross_entropy",
    "combine_rows",
    "combine_rows_back",
    "float8_encode",
    "float8_decode",
    "quantize_tiles",
    "dequantize_tiles",
    "tile_errors",
    "mark_tiles",
    "product",
    "grouped_product",
)
