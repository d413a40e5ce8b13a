"""Compiled kernels against the reference implementations on the CPU; tests/gpu runs these checks on CUDA."""

from __future__ import annotations

import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.kernels import native, ops
from megatron.kernels.grid import Grid, Role, ScaleLayout
from tests.support import kernels as checks
from tests.support import tiles as tile_checks
from tests.support.combinations import THIRDS, in_third, mark_repeats

pytestmark = checks.need_kernels

DEVICE = "cpu"


@pytest.fixture(autouse=True)
def _compiled() -> None:
    """The reference implementations must not replace the kernels."""
    assert native.problem() is None


ROLES = [Role.PLAIN, Role.DELTA, Role.FEEDBACK]
SEED = (5 << 40) + 7


@pytest.mark.parametrize(
    ("role", "seed", "third"),
    # Each grid with two of the roles, with one of them stochastic.
    mark_repeats(
        product(ROLES, [None, SEED], THIRDS),
        keep=[
            *((Role.PLAIN, None, 0), (Role.DELTA, None, 1), (Role.FEEDBACK, None, 2)),
            *((Role.PLAIN, SEED, 1), (Role.DELTA, SEED, 2), (Role.FEEDBACK, SEED, 0)),
        ],
    ),
)
def test_codecs_give_the_reference_bits(role: Role, seed: int | None, third: int) -> None:
    """All widths, layouts, methods, grids and types; lengths around the chunks of the kernels, each with one seed."""
    for number, grid in enumerate(checks.grids()):
        if not in_third(number, third):
            continue
        lengths = (0, 1, 39, 1000, 5000) if grid.layout is not ScaleLayout.CHANNEL else (0, 40, 1000, 5000)
        for count in checks.lengths_in_turn(lengths, number + role + (seed is None)):
            dtype = checks.DTYPES[number % 3]
            x = checks.noise((count,), number, DEVICE, dtype)
            other = None if role is Role.PLAIN else checks.noise((count,), count, DEVICE, checks.DTYPES[number % 2])
            scale = torch.bfloat16 if number % 2 else torch.float32
            checks.check_codec(x, other, grid, role, seed, scale)


def test_codecs_on_the_default_levels_give_the_reference_bits() -> None:
    checks.check_usual_codecs(DEVICE)


def test_codecs_split_over_threads_give_the_reference_bits() -> None:
    for grid in (Grid(4), Grid(3, ScaleLayout.CHANNEL, 64), Grid(8, ScaleLayout.TENSOR), Grid(2, rotation=32)):
        checks.check_codec(checks.noise((1 << 17,), 1, DEVICE), None, grid, Role.PLAIN, None, torch.float32)


@pytest.mark.parametrize(
    ("role", "third"),
    mark_repeats(product(ROLES, THIRDS), keep=[(Role.PLAIN, 0), (Role.DELTA, 1), (Role.FEEDBACK, 2)]),
)
def test_tiled_messages_give_the_reference_bits(role: Role, third: int) -> None:
    tile_checks.check_tilings(DEVICE, (0, 5, 999, 5000), role, third)


def test_tiles_split_over_threads_give_the_reference_bits() -> None:
    tile_checks.check_tilings(DEVICE, ((1 << 15) + 1000,), Role.PLAIN)


def test_errors_and_maps_of_tiles() -> None:
    tile_checks.check_errors(DEVICE)
    tile_checks.check_marks(DEVICE)
    tile_checks.check_any_map(DEVICE)
    tile_checks.check_many_tiles(DEVICE)


@settings(max_examples=150, deadline=None)
@given(
    grid=st.sampled_from(list(checks.grids())),
    count=st.integers(0, 700),
    dtype=st.sampled_from(checks.DTYPES),
    power=st.integers(-40, 30),
    seed=st.integers(0, 99),
)
def test_special_numbers_give_the_reference_bits(
    grid: Grid, count: int, dtype: torch.dtype, power: int, seed: int
) -> None:
    """Zeros of both signs, NaN, infinities, subnormal and huge numbers."""
    count = count // grid.group * grid.group if grid.layout is ScaleLayout.CHANNEL else count
    x = checks.spoil(checks.noise((count,), seed, DEVICE) * 2.0**power, seed).to(dtype)
    checks.check_codec(x, None, grid, Role.PLAIN, None, torch.float32)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_multiples_of_64_give_the_reference_bits(bits: int) -> None:
    checks.check_whole_64s(DEVICE, bits)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(0, 4),
    n=st.integers(1, 400),
    share=st.floats(0, 1),
    levels=st.sampled_from([1, 3, 50, 0]),
    seed=st.integers(0, 99),
)
def test_topk_is_that_of_a_stable_sort(rows: int, n: int, share: float, levels: int, seed: int) -> None:
    """With many ties (few levels), and with non-finite numbers."""
    x = checks.noise((rows, n), seed, DEVICE)
    x = (x * levels).round() if levels else checks.spoil(x, seed)
    checks.check_topk(x, int(share * n))


def test_topk_with_several_threads() -> None:
    x = checks.noise((1, 300_000), 0, DEVICE)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for count in (1, 3000, 150_000, 299_999):
            checks.check_topk(x, count)
            checks.check_topk((x * 2).round(), count)


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 3), n=st.integers(1, 300), radius=st.integers(0, 400), seed=st.integers(0, 99))
def test_dilation_and_places(rows: int, n: int, radius: int, seed: int) -> None:
    mask = checks.noise((rows, n), seed, DEVICE) > 1.5
    checks.check_dilate(mask, radius)
    checks.check_places(checks.noise((rows * n,), seed, DEVICE), mask.view(-1).nonzero().view(-1))


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 40_000),
    dtype=st.sampled_from(checks.DTYPES),
    stride=st.integers(1, 9),
    spoiled=st.booleans(),
    seed=st.integers(0, 99),
)
@example(
    count=3372, dtype=torch.bfloat16, stride=1, spoiled=False, seed=74
)  # a quotient that must not be rounded twice
def test_norms_and_histograms(count: int, dtype: torch.dtype, stride: int, spoiled: bool, seed: int) -> None:
    x = checks.noise((count,), seed, DEVICE, dtype)
    x = checks.spoil(x, seed) if spoiled else x
    checks.check_norm(x)
    checks.check_histogram(x, stride, 1 + seed * 10)


@settings(max_examples=60, deadline=None)
@given(
    k=st.integers(0, 3),
    n=st.integers(1, 150),
    r=st.integers(1, 70),
    rank=st.integers(0, 70),
    power=st.integers(-60, 60),
    seed=st.integers(0, 9),
)
def test_bases_of_any_rank(k: int, n: int, r: int, rank: int, power: int, seed: int) -> None:
    """Full rank, deficient and zero; tiny and huge."""
    r, rank = min(n, r), min(n, r, rank)
    x = checks.noise((k, n, rank), seed, DEVICE) @ checks.noise((k, rank, r), seed + 1, DEVICE) * 2.0**power
    checks.check_bases(x)


def test_bases_of_nearly_deficient_matrices() -> None:
    """Up to condition numbers at which the triangular factor is abandoned."""
    for seed in range(60):
        n = 20 + seed
        u, v = (torch.linalg.qr(checks.noise((n, n), 2 * seed + i, DEVICE).double()).Q for i in range(2))
        shrink = torch.logspace(0, -seed / 8, n, dtype=torch.float64)
        checks.check_bases((u * shrink @ v).float().unsqueeze(0))


def test_bases_do_not_depend_on_threads() -> None:
    x = checks.noise((1, 5000, 40), 3, DEVICE)
    torch.set_num_threads(1)
    single_threaded = ops.orthonormalize(x)
    torch.set_num_threads(4)
    assert torch.equal(ops.orthonormalize(x), single_threaded)


def test_bases_of_zeros_and_non_finite_matrices() -> None:
    checks.check_extraordinary_bases(DEVICE)


@settings(max_examples=80, deadline=None)
@given(
    dtype=st.sampled_from(checks.DTYPES),
    tokens=st.integers(1, 9),
    valid=st.integers(1, 2100),
    padding=st.integers(0, 70),
    scale=st.sampled_from([0.0, 1.0, 10.0]),
)
def test_cross_entropy(dtype: torch.dtype, tokens: int, valid: int, padding: int, scale: float) -> None:
    checks.check_cross_entropies(DEVICE, dtype, tokens, valid + padding, valid, scale)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(checks.DTYPES),
    tokens=st.integers(0, 9),
    k=st.integers(1, 5),
    width=st.integers(1, 2100),
    missing=st.floats(0, 1),
)
def test_combined_rows(dtype: torch.dtype, tokens: int, k: int, width: int, missing: float) -> None:
    checks.check_combined_rows(DEVICE, dtype, tokens, k, width, round(missing * tokens * k))


def test_combined_rows_do_not_depend_on_threads() -> None:
    rows_rh, grad_th = checks.noise((200, 700), 1, DEVICE), checks.noise((100, 700), 2, DEVICE)
    places_tk, weights_tk = torch.randperm(200).view(100, 2), torch.rand(100, 2)
    outputs = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        out_th = torch.empty(100, 700)
        ops.combine_rows(rows_rh, places_tk, weights_tk, out_th)
        outputs.append((out_th, *ops.combine_rows_back(grad_th, rows_rh, places_tk, weights_tk)))
    assert all(map(torch.equal, *outputs))


def test_combined_rows_refuse_wrong_operands() -> None:
    rows_rh, places_tk, out_th = torch.zeros(4, 8), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 8)
    for operands, message in (
        ((rows_rh, places_tk, None, torch.zeros(2, 9)), "of one type and as wide"),
        ((rows_rh, places_tk, None, out_th.bfloat16()), "of one type and as wide"),
        ((rows_rh, places_tk.int(), None, out_th), "places must be int64"),
        ((rows_rh, places_tk[:1], None, out_th), "places must be int64"),
        ((rows_rh, places_tk, torch.zeros(3), out_th), "one number for each place"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.megatron_cc.combine_rows(*operands)


def test_cross_entropy_of_a_large_vocabulary_does_not_depend_on_threads() -> None:
    outputs = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        checks.check_cross_entropies(DEVICE, torch.float32, 5, 50_304, 50_257, 3.0)
        logits_tv, stats = checks.noise((7, 50_304), 1, DEVICE), torch.empty(2, 7)
        ops.cross_entropy(logits_tv, torch.arange(7), 50_257, stats[0], stats[1], torch.ones(7))
        outputs.append((logits_tv, stats))
    assert all(map(torch.equal, *outputs))


def test_cross_entropy_refuses_labels_beyond_the_vocabulary() -> None:
    with pytest.raises(RuntimeError, match="label 9 of token 1 is beyond the 9 columns"):
        ops.cross_entropy(torch.zeros(2, 16), torch.tensor([3, 9]), 9, torch.zeros(2), torch.zeros(2))


def test_a_library_of_other_sources_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.problem() is None
    shutil.copytree(native._SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(native, "_SOURCES", tmp_path / "csrc")
    assert native._load() is None
    (tmp_path / "csrc" / "mcc.h").write_text("/* newer */")
    assert "other sources" in str(native._load())


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_every_instruction_set_gives_the_same_bits() -> None:
    """Each in a separate process; a processor falls back to an older instruction set."""
    script = (
        "import torch, hashlib\n"
        "from megatron.kernels import native, ops\n"
        "assert not native.problem.cache_info().currsize, 'the instruction set is chosen already'\n"
        "from megatron.kernels.float8 import Float8\n"
        "from megatron.kernels.grid import Grid, GridKind, ScaleLayout, Role\n"
        "from tests.support import tiles as tile_checks\n"
        "x = torch.randn(5003, generator=torch.Generator().manual_seed(0))\n"
        "digest = hashlib.sha256()\n"
        "for bits in range(1, 9):\n"
        "    layouts = (ScaleLayout.GROUP, ScaleLayout.TENSOR)\n"
        "    kinds = [Grid(bits, layout, 64, kind) for kind in GridKind for layout in layouts]\n"
        "    for grid, seed in ((grid, seed) for grid in (Grid(bits, rotation=64), *kinds) for seed in (3, None)):\n"
        "        codes = torch.empty(grid.code_bytes(5003), dtype=torch.uint8)\n"
        "        scales, left = torch.empty(grid.scale_count(5003)), torch.zeros(5003)\n"
        "        ops.quantize_pack(x, codes, scales, grid, Role.FEEDBACK, left, seed=seed)\n"
        "        for t in (codes, scales, left):\n"
        "            digest.update(t.numpy().tobytes())\n"
        "for tiles in tile_checks.tilings(5003):\n"
        "    message = tile_checks.blank(tiles, torch.float32, 'cpu')\n"
        "    ops.quantize_tiles(x, message, tiles, Role.PLAIN, None, 3 if tiles.grid.bits % 2 else None)\n"
        "    for t in tile_checks.tensors_of(message):\n"
        "        digest.update(t.numpy().tobytes())\n"
        "digest.update(ops.abs_topk(x.view(1, -1), 700).numpy().tobytes())\n"
        "x = torch.randn(70003, generator=torch.Generator().manual_seed(0))\n"
        "for form, seed in ((Float8(m, g), s) for m in (2, 3) for g in (100, 128, 70003) for s in (None, 3)):\n"
        "    codes = torch.empty(70003, dtype=torch.uint8)\n"
        "    scales, out = torch.empty(form.scale_count(70003)), torch.zeros(70003)\n"
        "    ops.float8_encode(x, codes, scales, form, seed)\n"
        "    ops.float8_decode(codes, scales, out, form)\n"
        "    for t in (codes, scales, out):\n"
        "        digest.update(t.numpy().tobytes())\n"
        "digest.update(ops.finite_norm(x).numpy().tobytes())\n"
        "digest.update(ops.orthonormalize(x[:5000].view(1, -1, 40)).numpy().tobytes())\n"
        "print(digest.hexdigest())\n"
    )

    def digest(name: str) -> str:
        env = {"MCC_ISA": name, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
        return done.stdout

    assert digest("baseline") == digest("avx2") == digest("")


@pytest.mark.slow
def test_orthonormalizing_a_single_matrix_creates_no_threads() -> None:
    """A nested parallel region, even of a single thread, would create threads at every call. Here the remaining memory
    is too small for the stack of a new thread."""
    script = (
        "import resource, torch\n"
        "from megatron.kernels import ops\n"
        "torch.set_num_threads(2)\n"
        "many_knr, one_1nr = torch.randn(4, 4096, 32), torch.randn(1, 4096, 32)\n"
        "ops.orthonormalize(many_knr)\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "limit = pages * resource.getpagesize() + (64 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "ops.orthonormalize(one_1nr)\n"
        "print('done')\n"
    )
    env = {"OMP_NUM_THREADS": "2", "OMP_STACKSIZE": "256M", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_the_reference_implementations_can_be_chosen() -> None:
    script = (
        "import torch\n"
        "from megatron.kernels import native, ops\n"
        "assert 'asks for it' in native.problem()\n"
        "assert ops.abs_topk(torch.tensor([[1.0, -3.0, 2.0]]), 2).tolist() == [[1, 2]]\n"
    )
    env = {"MEGATRON_CC_KERNELS": "reference", "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", script], check=True, env=env)
