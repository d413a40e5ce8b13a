"""CUDA kernels without a GPU: they compile, and an emulator runs their logic."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

import setup as build
from megatron.kernels import native
from megatron.kernels.grid import Grid, Role, ScaleLayout, ScaleMethod
from tests.support import float8 as float8_checks
from tests.support import kernels as checks
from tests.support import tiles as tile_checks
from tests.support.combinations import THIRDS, in_third, mark_repeats

pytestmark = pytest.mark.slow

REPO = Path(__file__).resolve().parents[3]
CSRC = REPO / "megatron" / "kernels" / "csrc"
CXX = os.environ.get("CXX", "g++")
COMMON = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", f"-DTORCH_TARGET_VERSION={build.TARGET}"]
INCLUDES = [word for path in cpp_extension.include_paths() for word in ("-isystem", path)]
LIBRARIES = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-ltorch", "-ltorch_cpu", "-lc10"]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def _sources() -> list[Path]:
    return sorted((CSRC / "cuda").glob("*.cu"))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An extension whose operators (torch.ops.megatron_cc_emulated) run the CUDA sources on the CPU."""
    if shutil.which(CXX) is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("emulated")
    shim = ["-O1", "-U_FORTIFY_SOURCE", "-DMCC_EMULATED", "-DMCC_CUDA", "-Wno-unknown-pragmas"]
    shim.append(f"-I{REPO / 'tests/support/cuda_emulator'}")

    def compile_source(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        language = ["-x", "c++"] if source.suffix == ".cu" else []
        _run([CXX, *COMMON, *shim, *INCLUDES, *language, "-c", str(source), "-o", str(target)])
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_source, [CSRC / "binding.cpp", *_sources()]))
    library = folder / "emulated.so"
    _run([CXX, "-shared", *objects, *LIBRARIES, "-o", str(library)])
    torch.ops.load_library(str(library))
    return library


@pytest.fixture
def device(emulated: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(native, "operators", lambda: torch.ops.megatron_cc_emulated)
    monkeypatch.setattr(native, "problem_on", lambda kind: None if kind == "cpu" else "emulated")
    return "cpu"


# Each grid and each tiling with one of the roles; the repeats have them with the others.
EACH_ONCE = mark_repeats(
    product([Role.PLAIN, Role.DELTA, Role.FEEDBACK], THIRDS),
    keep=[(Role.PLAIN, 0), (Role.DELTA, 1), (Role.FEEDBACK, 2)],
)


@pytest.mark.parametrize(("role", "third"), EACH_ONCE)
def test_codecs(device: str, role: Role, third: int) -> None:
    """All widths, layouts, methods, grids and types; each length with one or two of the roles."""
    for number, grid in enumerate(checks.grids()):
        if not in_third(number, third):
            continue
        lengths = (0, 1, 999, 2600) if grid.layout is not ScaleLayout.CHANNEL else (0, 40, 1000)
        for count in checks.lengths_in_turn(lengths, number + role):
            dtype = checks.DTYPES[number % 3]
            x = checks.spoil(checks.noise((count,), number, device, dtype), number)
            other = None if role is Role.PLAIN else checks.noise((count,), count, device, checks.DTYPES[number % 2])
            scale = torch.bfloat16 if number % 2 else torch.float32
            checks.check_codec(x, other, grid, role, 77 if number % 5 == 0 else None, scale)


def test_usual_codecs(device: str) -> None:
    checks.check_usual_codecs(device)


def test_scales_over_many_pieces(device: str) -> None:
    for method in ScaleMethod:
        grid = Grid(4, ScaleLayout.TENSOR, method=method)
        checks.check_codec(checks.noise((40_000,), 1, device), None, grid, Role.PLAIN, None, torch.float32)


def test_topk(device: str) -> None:
    """Rows within a block, of several blocks, and of several blocks not aligned to 16 bytes."""
    checks.check_topks(device, [(1, 1), (3, 100), (2, 4096), (2, 4097), (1, 33_000), (3, 20_001)])


def test_dilation_and_places(device: str) -> None:
    for radius in (0, 1, 7, 500):
        mask = checks.noise((3, 300), radius, device) > 1.3
        checks.check_dilate(mask, radius)
        checks.check_places(checks.noise((900,), radius, device), mask.view(-1).nonzero().view(-1))


def test_places_out_of_range_are_ignored(device: str) -> None:
    checks.check_places_outside(device)


def test_norms_and_histograms(device: str) -> None:
    checks.check_histograms(device, (0, 1, 500, 40_000))


@pytest.mark.parametrize("rank", [0, 5, 37])
def test_bases(device: str, rank: int) -> None:
    for n, r, power in ((1, 1, 0), (37, 37, -60), (70, 33, 60)):
        rank_of_input = min(rank, n, r)
        checks.check_bases(
            checks.noise((2, n, rank_of_input), 0, device) @ checks.noise((2, rank_of_input, r), 1, device) * 2.0**power
        )


# The kernels for 96 and 128 columns give the bits of that for 129: see below.
@pytest.mark.parametrize("rank", mark_repeats([8, 33, 96, 128, 129], keep=[8, 33, 129]))
def test_bases_of_stacks_of_different_matrices(device: str, rank: int) -> None:
    """There are kernels for up to 32, 64, 96 and 128 columns, and for more."""
    checks.check_mixed_bases(device, rank)


def test_bases_begin_with_those_of_fewer_columns(device: str) -> None:
    checks.check_leading_bases(device, (6, 8, 31, 32, 33, 64, 65, 96, 97, 128))


def test_bases_of_zeros_and_non_finite_matrices(device: str) -> None:
    checks.check_extraordinary_bases(device)


def test_bases_that_need_a_second_iteration(device: str) -> None:
    u, v = (torch.linalg.qr(checks.noise((40, 40), i, device).double()).Q for i in range(2))
    stack = [(u * torch.logspace(0, -power, 40, dtype=torch.float64) @ v).float() for power in (0, 3, 4, 8)]
    checks.check_bases(torch.stack(stack))


@pytest.mark.parametrize("dtype", checks.DTYPES)
def test_cross_entropy(device: str, dtype: torch.dtype) -> None:
    """Rows aligned to 16 bytes or not, shorter and longer than a block, with and without padding."""
    sizes = ((1, 1, 1), (3, 40, 40), (4, 96, 70), (3, 1111, 1100), (2, 1152, 1030), (2, 5000, 4999))
    for tokens, columns, valid in sizes:
        checks.check_cross_entropies(device, dtype, tokens, columns, valid, 3.0)


@pytest.mark.parametrize("dtype", checks.DTYPES)
def test_combined_rows(device: str, dtype: torch.dtype) -> None:
    """Rows aligned to 16 bytes or not, of a single number to several blocks; tokens without rows."""
    small = ((1, 1, 1, 0), (5, 2, 40, 0), (4, 3, 96, 5), (3, 2, 8, 6), (0, 2, 8, 0))
    for shape in (*small, (3, 2, 1111, 2), (2, 8, 2056, 3)):
        checks.check_combined_rows(device, dtype, *shape)


def test_float8(device: str) -> None:
    for mantissa in float8_checks.MANTISSAS:
        float8_checks.check_codes(device, mantissa)
    float8_checks.check_formats(device, (0, 1, 999, 2600))
    float8_checks.check_large_groups(device)
    float8_checks.check_unaligned(device)


@pytest.mark.parametrize(("role", "third"), EACH_ONCE)
def test_tiled_messages(device: str, role: Role, third: int) -> None:
    tile_checks.check_tilings(device, (0, 5, 2600), role, third)


def test_errors_and_maps_of_tiles(device: str) -> None:
    tile_checks.check_errors(device)
    tile_checks.check_marks(device)
    tile_checks.check_any_map(device)
    tile_checks.check_many_tiles(device)


NVCC = shutil.which("nvcc")


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_all_kernels_compile_and_the_extension_links(every: bool, tmp_path: Path) -> None:
    """For the oldest architecture or for every architecture, without warnings and spilled registers. The operators
    register even with a torch without CUDA; the only function of a CUDA torch is bound when it is called."""
    assert NVCC is not None
    architectures = build.gencode_flags()
    flags = [
        *build.CUDA_FLAGS,
        *(architectures if every else architectures[:1]),
        "-Werror=all-warnings",
        "-Xptxas=-v,-warn-spills",
    ]

    def compile_cuda(source: Path) -> tuple[str, str]:
        target = str(tmp_path / f"{source.stem}.cu.o")
        return target, _run([str(NVCC), *flags, "-c", str(source), "-o", target])

    def compile_cpp(source: Path) -> str:
        target = str(tmp_path / f"{source.stem}.o")
        toolkit = Path(str(NVCC)).resolve().parents[1] / "include"
        macros = ["-DMCC_CUDA", "-DUSE_CUDA", "-isystem", str(toolkit)]
        fast = ["-O0"]  # other tests compile and run this code
        _run([CXX, *COMMON, *fast, "-fopenmp", *macros, *INCLUDES, "-c", str(source), "-o", target])
        return target

    with ThreadPoolExecutor(2) as pool:
        compiled = list(pool.map(compile_cuda, _sources()))
        objects = list(pool.map(compile_cpp, [CSRC / "binding.cpp", *sorted((CSRC / "cpu").glob("*.cpp"))]))
    log, count = "".join(text for _, text in compiled), 3 if every else 1
    assert len(re.findall(r"Function properties", log)) >= 25 * count
    for kernel in ("quantize_lanes", "dequantize_words", "errors_in_lanes", "errors_of_tiles", "rank_marked"):
        assert len(re.findall(rf"Function properties for \w*{kernel}", log)) >= count, kernel
    assert re.findall(r"[1-9]\d* bytes spill (?:stores|loads)", log) == []
    library = tmp_path / "extension.so"
    _run([str(NVCC), "-shared", "-cudart=static", "-Xcompiler=-fopenmp", *objects, *(t for t, _ in compiled),
          *LIBRARIES, "-o", str(library)])  # fmt: skip
    script = (
        "import ctypes, os, torch\n"
        f"ctypes.CDLL({str(library)!r}, mode=os.RTLD_LAZY)\n"
        "has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        "assert has('megatron_cc::quantize_pack', 'CUDA') and has('megatron_cc::quantize_pack', 'CPU')\n"
    )
    _run([sys.executable, "-c", script])
