"""Delayed gradients over NCCL, all ranks on one GPU."""

from __future__ import annotations

import pytest

from tests.multiprocess import test_delay as delay
from tests.multiprocess import test_delay_rule as rule

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]


@pytest.mark.parametrize("ranks", [2, 4])
def test_layouts_equal_a_plain_loop(ranks: int) -> None:
    """Without a flush, pipelines need gloo."""
    names = [name for name in rule.LAYOUTS[ranks] if "without a flush" not in name]
    rule.test_layouts_equal_a_plain_loop(ranks, dict.fromkeys(("adam", "ahead"), names))


def test_compressors_see_the_same_gradients() -> None:
    delay.test_compressors_see_the_same_gradients(2, delay.BUCKETS, delay.ON_REPLICAS)
