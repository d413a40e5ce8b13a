"""Registration of the compiled operators: schemas, meta functions, compilation, and checks of operands."""

from __future__ import annotations

import pytest
import torch

from megatron.kernels import native
from megatron.kernels.grid import Grid
from tests.support import kernels as checks

pytestmark = checks.need_kernels


@pytest.fixture(autouse=True)
def _compiled() -> None:
    """Load the compiled operators."""
    assert native.problem() is None


def _tiled_message() -> tuple[torch.Tensor, ...]:
    """Buffers of 64 numbers in tiles of 8: three tiles of 4 bits, five of 3 bits."""
    codes = [torch.zeros(size, dtype=torch.uint8) for size in (15, 12, 1, 1)]
    return codes[0], torch.zeros(5), codes[1], torch.zeros(3), *codes[2:]


def _operands() -> dict[str, tuple[object, ...]]:
    x, mask = torch.randn(64), torch.zeros(2, 9, dtype=torch.bool)
    codes, scales = torch.zeros(32, dtype=torch.uint8), torch.zeros(1)
    rows, matrix = torch.randn(4, 8), torch.randn(2, 9, 3)
    index, tile_map = torch.tensor([1, 5]), torch.zeros(1, dtype=torch.uint8)
    gradients = torch.zeros(4, 8), torch.zeros(2, 2)
    return {
        "quantize_pack": (x, torch.zeros(64), codes, scales, 1, 4, 0, 64, 0, 0, 0, False, 0),
        "unpack_dequantize": (codes, scales, torch.zeros(64), x, 1, 4, 0, 64, 0, 0, 0),
        "abs_topk": (rows, torch.zeros(4, 2, dtype=torch.int64)),
        "dilate": (mask, 2, mask.clone()),
        "gather_packed": (x, index, torch.zeros(2)),
        "scatter_add_packed": (x, index, torch.zeros(2)),
        "finite_norm": (x, torch.zeros(2, dtype=torch.float64)),
        "sample_histogram": (x, 2, torch.zeros(5, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)),
        "orthonormalize": (matrix, torch.zeros(2, 9, 3)),
        "cross_entropy": (rows, torch.tensor([1, 0, 6, -1]), 7, torch.ones(4), torch.ones(4), torch.ones(4)),
        "combine_rows": (rows, torch.tensor([[1, 0], [3, 4]]), torch.ones(2, 2), torch.zeros(2, 8)),
        "combine_rows_back": (torch.ones(2, 8), rows, torch.tensor([[1, 0], [3, 2]]), torch.ones(2, 2), *gradients),
        "float8_encode": (x, torch.zeros(64, dtype=torch.uint8), torch.zeros(2), 3, 32, False, 0),
        "float8_decode": (torch.zeros(64, dtype=torch.uint8), torch.zeros(2), x, 3, 32, 1),
        "quantize_tiles": (x, torch.zeros(64), *_tiled_message(), 2, 3, 0, 8, 0, 0, 0, 16, 2.0, 0, 8, 3, True, 5, 6),
        "dequantize_tiles": (*_tiled_message(), x, 3, 3, 0, 8, 0, 0, 0, 16, 0, 8, 3),
        "tile_errors": (x, torch.zeros(64), tile_map, torch.zeros(8), 1, 3, 8, 0, 0, 0, 16, 2.0, 8),
        "mark_tiles": (index, tile_map),
        "product": (rows, torch.randn(8, 3), torch.zeros(4, 3), True),
        "grouped_product": (rows, torch.randn(2, 8, 3), torch.tensor([1, 4], dtype=torch.int32), torch.zeros(4, 3)),
    }


@pytest.mark.parametrize("name", native.OPERATORS)
def test_operators_pass_torchs_checks(name: str) -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.megatron_cc, name).default, _operands()[name], test_utils=tests)


def test_every_operator_is_listed() -> None:
    registered = {n.split("::")[1].split(".")[0] for n in torch._C._dispatch_get_all_op_names() if "megatron_cc::" in n}
    assert (
        registered - {"sources", "multiplies", "outdoes_mkl", "smallest_product"}
        == set(native.OPERATORS)
        == set(_operands())
    )


def test_operators_compile_in_a_single_graph() -> None:
    grid = Grid(4)

    def round_trip(x: torch.Tensor) -> torch.Tensor:
        codes = torch.empty(grid.code_bytes(x.numel()), dtype=torch.uint8)
        scales = torch.empty(grid.scale_count(x.numel()))
        empty = x.new_empty(0)
        torch.ops.megatron_cc.quantize_pack(x, empty, codes, scales, 0, 4, 0, 64, 0, 0, 0, False, 0)
        out = torch.empty_like(x)
        torch.ops.megatron_cc.unpack_dequantize(codes, scales, empty, out, 0, 4, 0, 64, 0, 0, 0)
        return out * 2

    x = torch.randn(1000)
    assert torch.equal(torch.compile(round_trip, fullgraph=True, backend="aot_eager")(x), round_trip(x))


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("quantize_pack", 0, torch.randn(64).double()),
        ("quantize_pack", 0, torch.randn(128)[::2]),
        ("quantize_pack", 2, torch.zeros(31, dtype=torch.uint8)),
        ("quantize_pack", 5, 9),
        ("quantize_pack", 7, 12),
        ("quantize_pack", 8, 5),
        ("quantize_pack", 8, 3),
        ("quantize_pack", 10, 24),
        ("unpack_dequantize", 1, torch.zeros(2)),
        ("abs_topk", 1, torch.zeros(4, 9, dtype=torch.int64)),
        ("gather_packed", 1, torch.tensor([1, 64])),
        ("scatter_add_packed", 1, torch.tensor([-1, 5])),
        ("orthonormalize", 0, torch.randn(2, 3, 9)),
        ("float8_encode", 1, torch.zeros(63, dtype=torch.uint8)),
        ("float8_encode", 2, torch.zeros(2).half()),
        ("float8_encode", 3, 4),
        ("float8_encode", 4, 0),
        ("float8_decode", 1, torch.zeros(1)),
        ("float8_decode", 2, torch.zeros(64).bfloat16()),
        ("float8_decode", 5, 2),
        ("quantize_tiles", 4, torch.zeros(11, dtype=torch.uint8)),
        ("quantize_tiles", 5, torch.zeros(2)),
        ("quantize_tiles", 5, torch.zeros(3).bfloat16()),
        ("quantize_tiles", 6, torch.zeros(2, dtype=torch.uint8)),
        ("quantize_tiles", 15, 24),
        ("quantize_tiles", 16, 0.5),
        ("quantize_tiles", 18, 12),
        ("quantize_tiles", 19, 9),
        ("dequantize_tiles", 5, torch.zeros(0, dtype=torch.uint8)),
        ("dequantize_tiles", 7, 1),
        ("tile_errors", 3, torch.zeros(7)),
        ("mark_tiles", 0, torch.tensor([1, 8])),
        ("product", 0, torch.randn(4, 8).double()),
        ("product", 1, torch.randn(7, 3)),
        ("product", 2, torch.zeros(3, 4).t()),
        ("product", 2, torch.zeros(4, 4)),
        ("grouped_product", 1, torch.randn(3, 8, 3)),
        ("grouped_product", 2, torch.tensor([3, 2], dtype=torch.int32)),
        ("grouped_product", 2, torch.tensor([1, 5], dtype=torch.int32)),
        ("grouped_product", 2, torch.tensor([1, 4])),
        ("grouped_product", 3, torch.zeros(5, 3)),
    ],
)
def test_wrong_operands_are_refused(name: str, index: int, value: object) -> None:
    operands = list(_operands()[name])
    operands[index] = value
    with pytest.raises(RuntimeError):
        getattr(torch.ops.megatron_cc, name)(*operands)
