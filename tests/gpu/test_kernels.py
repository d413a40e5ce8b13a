"""The CUDA kernels on a device: the checks that the CPU's pass, over longer inputs."""

from __future__ import annotations

import pytest
import torch

from megatron.kernels import native, ops, products
from megatron.kernels.grid import Grid, Role, ScaleLayout, ScaleMethod
from tests.support import float8 as float8_checks
from tests.support import kernels as checks
from tests.support import tiles as tile_checks

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@pytest.fixture(autouse=True)
def compiled_kernels() -> None:
    """Where there is a GPU, the kernels must be there, too: nothing would be tested without them."""
    if (why := native.problem_on(DEVICE)) is not None:
        pytest.fail(f"no compiled kernels: {why}", pytrace=False)


@pytest.mark.parametrize("role", [Role.PLAIN, Role.DELTA, Role.FEEDBACK])
@pytest.mark.parametrize("seed", [None, (5 << 40) + 7])
def test_codecs_give_the_reference_bits(role: Role, seed: int | None) -> None:
    for number, grid in enumerate(checks.grids()):
        for count in (0, 1, 999, 70_001) if grid.layout is not ScaleLayout.CHANNEL else (0, 40, 100_000):
            dtype = checks.DTYPES[number % 3]
            x = checks.spoil(checks.noise((count,), number, DEVICE, dtype), number)
            other = None if role is Role.PLAIN else checks.noise((count,), count, DEVICE, checks.DTYPES[number % 2])
            checks.check_codec(x, other, grid, role, seed, torch.bfloat16 if number % 2 else torch.float32)


def test_usual_codecs() -> None:
    checks.check_usual_codecs(DEVICE)


def test_codes_equal_the_cpus() -> None:
    """Bit by bit, so that a run's ends may be a GPU and a CPU."""
    x = checks.noise((123_457,), 0, "cpu")
    for grid in checks.grids():
        if grid.method is ScaleMethod.L2 or grid.is_sign or grid.layout is ScaleLayout.CHANNEL:
            continue
        encoded = []
        for device in ("cpu", DEVICE):
            codes = torch.empty(grid.code_bytes(x.numel()), dtype=torch.uint8, device=device)
            scales = torch.empty(grid.scale_count(x.numel()), device=device)
            ops.quantize_pack(x.to(device), codes, scales, grid, seed=11)
            encoded.append((codes.cpu(), scales.cpu()))
        assert torch.equal(encoded[0][0], encoded[1][0])
        assert torch.equal(encoded[0][1], encoded[1][1])


@pytest.mark.parametrize("role", [Role.PLAIN, Role.DELTA, Role.FEEDBACK])
def test_messages_by_tiles(role: Role) -> None:
    tile_checks.check_tilings(DEVICE, (0, 5, 70_001), role)


def test_errors_and_maps_of_tiles() -> None:
    tile_checks.check_errors(DEVICE)
    tile_checks.check_marks(DEVICE)
    tile_checks.check_any_map(DEVICE)
    tile_checks.check_many_tiles(DEVICE)


def test_unaligned_views() -> None:
    """Halves and codes that do not begin at 16 bytes."""
    for start in (1, 2, 3, 5):
        x = checks.noise((5000,), start, DEVICE, torch.bfloat16)[start:]
        checks.check_codec(x, None, Grid(4), Role.PLAIN, None, torch.float32, start)


def test_topk() -> None:
    """In the last, blocks take several parts of a row, and some none."""
    shapes = [(1, 1), (3, 100), (2, 20_000), (3, 20_001), (1, 3_000_000), (64, 65_536), (300, 40_001)]
    checks.check_topks(DEVICE, shapes)


def test_dilation_and_places() -> None:
    for radius in (0, 1, 7, 500):
        mask = checks.noise((3, 30_000), radius, DEVICE) > 1.3
        checks.check_dilate(mask, radius)
        checks.check_places(checks.noise((90_000,), radius, DEVICE), mask.view(-1).nonzero().view(-1))


def test_norms_and_histograms() -> None:
    checks.check_histograms(DEVICE, (0, 1, 500, 4_000_000))


@pytest.mark.parametrize("rank", [0, 1, 5, 128])
def test_bases(rank: int) -> None:
    for n, r, power in ((1, 1, 0), (37, 37, -60), (1000, 40, 60), (4096, 128, 0)):
        columns = min(rank, n, r)
        checks.check_bases(
            checks.noise((2, n, columns), 0, DEVICE) @ checks.noise((2, columns, r), 1, DEVICE) * 2.0**power
        )


def test_places_outside_are_left_out() -> None:
    checks.check_places_outside(DEVICE)


def test_a_label_outside_is_no_number() -> None:
    logits, labels = checks.noise((2, 40), 0, DEVICE), torch.tensor([3, 30], device=DEVICE)
    lse, target = (torch.empty(2, device=DEVICE) for _ in range(2))
    native.operators().cross_entropy(logits, labels, 30, lse, target, None)
    assert target.isnan().tolist() == [False, True]


@pytest.mark.parametrize("rank", [8, 33, 96, 128, 129])
def test_bases_of_stacks_with_three_kinds_of_matrices(rank: int) -> None:
    """Up to 32, 64, 96 and 128 columns, and more, have a kernel each."""
    checks.check_mixed_bases(DEVICE, rank)


def test_bases_begin_with_those_of_fewer_columns() -> None:
    checks.check_leading_bases(DEVICE, (6, 8, 31, 32, 33, 64, 65, 96, 97, 128))


def test_bases_of_zeros_and_non_finite_values() -> None:
    checks.check_extraordinary_bases(DEVICE)


@pytest.mark.parametrize("dtype", checks.HALVES)
def test_a_product_adds_in_a_wider_total(dtype: torch.dtype) -> None:
    """In a single launch, without rounding the product."""
    a, b = (checks.noise((512, 256), seed, DEVICE, dtype) for seed in (1, 2))
    total = checks.noise((256, 256), 3, DEVICE)
    expected = total.double() + a.double().t() @ b.double()
    products.add_product_(total, a, b)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-3)
    products.add_product_(total.fill_(torch.nan), a, b, fresh=True)
    torch.testing.assert_close(total.double(), a.double().t() @ b.double(), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", checks.DTYPES)
def test_cross_entropy(dtype: torch.dtype) -> None:
    for tokens, columns, valid in ((1, 1, 1), (3, 40, 33), (4, 1111, 1100), (300, 50_304, 50_257), (5, 50_257, 50_257)):
        checks.check_cross_entropies(DEVICE, dtype, tokens, columns, valid, 3.0)


@pytest.mark.parametrize("dtype", checks.DTYPES)
def test_combined_rows(dtype: torch.dtype) -> None:
    for shape in ((1, 1, 1, 0), (5, 2, 40, 0), (4, 3, 1111, 5), (300, 8, 4096, 100), (64, 2, 8, 128), (0, 2, 8, 0)):
        checks.check_combined_rows(DEVICE, dtype, *shape)


@pytest.mark.parametrize("mantissa", float8_checks.MANTISSAS)
def test_codes_of_8_bit_floats_are_torchs(mantissa: int) -> None:
    float8_checks.check_codes(DEVICE, mantissa)


def test_8_bit_floats_give_the_reference_bits() -> None:
    float8_checks.check_formats(DEVICE, (0, 1, 999, 70_001))
    float8_checks.check_large_groups(DEVICE)
    float8_checks.check_unaligned(DEVICE)


def test_8_bit_floats_equal_the_cpus() -> None:
    x = checks.noise((123_457,), 0, "cpu")
    for _, form, scale in float8_checks.formats():
        encoded = []
        for device in ("cpu", DEVICE):
            codes, scales = float8_checks.message(x.numel(), form, scale, device)
            ops.float8_encode(x.to(device), codes, scales, form, 11)
            encoded.append((codes.cpu(), scales.cpu()))
        assert torch.equal(encoded[0][0], encoded[1][0])
        assert torch.equal(encoded[0][1], encoded[1][1])
