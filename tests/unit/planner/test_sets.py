"""Sets of compressors that the search tries."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.base.errors import UserError
from megatron.compression.points import Point
from megatron.parallel.data.buffer import replaces_grads
from megatron.planner import measure
from megatron.planner.choice import Choice
from megatron.planner.cluster import LinkSpec
from megatron.planner.dry_run import DryBackend
from megatron.planner.measure import Corrections, LiveBackend
from megatron.planner.predict import Predictor
from megatron.planner.search import SPEC_SETS, enumerate_choices, search
from tests.support.combinations import mark_repeats
from tests.support.documented import REPO
from tests.unit.planner.support import CLUSTER, VOCAB, predictor_of, small_run

pytestmark = pytest.mark.slow

GATHER = "param-gather=fixpoint,bits=4,group=2048"


def test_the_documentation_lists_the_sets() -> None:
    page = (REPO / "docs/guides/planner.md").read_text(encoding="utf-8")
    block = page.partition("the sets of compressors are the run's own, none, and these:")[2].split("```")[1]
    assert block.split("\n")[1:-1] == [" ".join(specs) for specs in SPEC_SETS if specs]


LARGEST = [specs for specs in SPEC_SETS if not any({*specs} < {*others} for others in SPEC_SETS)]
"""Sets that are in no other."""


@pytest.mark.parametrize(
    "specs",
    mark_repeats([pytest.param(s, id=" ".join(s)) for s in SPEC_SETS], keep=[" ".join(s) for s in LARGEST]),
)
def test_a_set_can_be_planned_and_trained(specs: tuple[str, ...]) -> None:
    """On a layout with all kinds of traffic."""
    config = small_run(model={"hidden_size": 512, "seq_length": 128})
    predictor = Predictor(config, CLUSTER, VOCAB)
    candidates = [
        choice
        for choice in enumerate_choices(config, CLUSTER, (specs,))
        if choice.layout == (2, 2, 2) and choice.micro_batch == 1
    ]
    assert {choice.sharded for choice in candidates} == {True, False}
    for choice in (next(choice for choice in candidates if choice.sharded is sharded) for sharded in (True, False)):
        plain = predictor.predict(replace(choice, specs=()))
        prediction = predictor.predict(choice)
        for point, _, name in (spec.partition("=") for spec in choice.specs if not spec.startswith("embedding")):
            # Factors are all-reduced, also with the sharded optimizer.
            full = 2 if choice.sharded and name.startswith("powersgd") else 1
            assert 0 < prediction.sent[point] < full * plain.sent[point]
        resolved = choice.configure(config).resolve(8)
        assert tuple(resolved.compression.compress) == choice.specs
        assert ("param-gather" in " ".join(choice.specs)) == (choice.sharded and GATHER in specs)


OUTER = (
    "outer=powersgd,rank=4,every=10",
    "outer=chunked-topk,outer-preset=sparseloco,every=10",
    "outer=fixpoint,bits=4,every=10",
)


@pytest.mark.parametrize("spec", [*sorted({spec for specs in SPEC_SETS for spec in specs}), *OUTER])
def test_coding_can_be_measured(spec: str) -> None:
    config = small_run(1, model={"hidden_size": 256})
    corrections = Corrections(config, VOCAB, Choice(1, 1, 1), CLUSTER, LiveBackend(torch.device("cpu"), repeats=2))
    assert 0 < corrections.measure_coding(spec, corrections.predict_coding(spec)) < math.inf


@pytest.mark.parametrize("precision", [{}, {"bf16": True}])
@pytest.mark.parametrize("clears", [False, True])
def test_the_measured_update_clears_gradients_as_training_does(precision: dict[str, bool], clears: bool) -> None:
    """On a CPU the first gradients of a step replace those of the last step."""
    assert replaces_grads(torch.device("cpu"))
    assert not replaces_grads(torch.device("cuda"))
    config = small_run(1, precision=precision)
    corrections = Corrections(config, VOCAB, Choice(1, 1, 1), CLUSTER, LiveBackend(torch.device("cpu"), repeats=2))
    gradients: list[torch.Tensor] = []
    replaces = mock.patch.object(measure, "replaces_grads", return_value=not clears)
    with replaces, mock.patch.object(measure, "finite_norm", gradients.append):
        corrections.measure_parts()
    assert bool(gradients[-1].any()) is not clears


def test_the_search_uses_two_levels_over_slow_links() -> None:
    config = small_run(model={"hidden_size": 256, "num_attention_heads": 1}, training={"global_batch_size": 8})
    slow = replace(CLUSTER, across=LinkSpec(0.05, 20.0))
    sets = tuple(specs for specs in SPEC_SETS if specs and specs[0].startswith("dp-grad=fixpoint"))
    assert len(sets) == 4
    best = search(Predictor(config, slow, VOCAB), sets, top=8).best
    (replicas,) = [choice.choice for choice in best if choice.choice.layout == (1, 1, 8)]
    assert replicas.specs[0] == "dp-grad=fixpoint,levels=8/4,error-feedback=on"


def _gathered(stages: str) -> tuple[float, float, float]:
    """Bytes and seconds of the gathers, and the number of parameters."""
    parallel: dict[str, Any] = {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}
    config = small_run(
        specs=(f"{GATHER},stages={stages}",) if stages else (),
        parallel=parallel,
        model={"untie_embeddings_and_output_weights": True},
    )
    slow = replace(CLUSTER, gpus_per_node=1, across=LinkSpec(1.0, 5.0))
    predictor, choice = predictor_of(config, slow)
    prediction = predictor.predict(choice)
    return prediction.sent["param-gather"], prediction.parts["parameters"], predictor.elements(choice, 0)


def test_other_stages_gather_exactly() -> None:
    """Both stages have the same size: half of the bytes are exact, and the slower stage takes the exact time."""
    (exact, exact_s, elements), (full, whole_s, _) = _gathered(""), _gathered("all")
    assert exact == pytest.approx(3 * elements * 4 / 4, rel=0.05)
    assert full == pytest.approx(exact / 8, rel=0.1)
    for stages in ("first:1", "last:1"):
        half, half_s, _ = _gathered(stages)
        assert half == pytest.approx((exact + full) / 2, rel=0.05)
        assert whole_s < half_s <= exact_s
        assert half_s == pytest.approx(exact_s, rel=0.2)


def test_dry_runs_of_two_levels_need_two_nodes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run with all replicas would take longer."""
    sizes: list[int] = []
    group = DryBackend.group

    def noting_group(self: DryBackend, size: int, recorder: Any, nodes: int = 0) -> Any:
        sizes.append(size)
        return group(self, size, recorder, nodes)

    monkeypatch.setattr(DryBackend, "group", noting_group)
    spec = "dp-grad=fixpoint,levels=8/4"
    for replicas in (8, 32):
        config = small_run(replicas, (spec,), training={"global_batch_size": 32})
        predictor = Predictor(config, replace(CLUSTER, gpus=replicas), VOCAB)
        choice = Choice(1, 1, replicas, micro_batches=32 // replicas, specs=(spec,))
        levels = predictor.book.levels(choice, Point.DP_GRAD)
        assert sorted(ranks for _, ranks in levels.values()) == sorted((4, replicas // 4))
        predictor.predict(choice)
    assert max(sizes) == 8


def test_layouts_are_tried_with_valid_compressors_alone() -> None:
    """The tied embedding has a compressor only where two stages have copies, and without the sharded optimizer."""
    config = small_run()
    for choice in enumerate_choices(config, CLUSTER, (("embedding=fused", "dp-grad=fixpoint,bits=4"),)):
        has_copies = choice.pp > 1 and choice.schedule != "zb-v"
        assert ("embedding=fused" in choice.specs) == (has_copies and not choice.sharded)
    with pytest.raises(UserError, match="leave the spec or the distributed optimizer out"):
        Choice(1, 2, 4, micro_batches=8, sharded=True, specs=("embedding=fused",)).configure(config).resolve(8)
