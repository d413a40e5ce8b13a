"""Compressors' state on another layout: sums of residuals are kept, and lost state is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.compressor_state import CompressorCheckpoint
from megatron.checkpoint.save import save_checkpoint
from megatron.models.stages import stage_layers
from megatron.training.assembly import Engines
from tests.support.combinations import mark_repeats
from tests.support.spawn import run_ranks
from tests.support.tiny import tiny_engines, tiny_train

Boxes = list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]


def _changes(*specs: str, **parallel: Any) -> dict[str, dict[str, Any]]:
    return {
        "parallel": parallel,
        "compression": {"compress": list(specs)},
        "training": {"global_batch_size": 4},
        "model": {"num_layers": 2},
        "precision": {"fp64": True},
    }


def _of(engines: Engines) -> CompressorCheckpoint:
    layout = engines.topology.layout
    layers = [stage_layers(engines.config.model, layout, stage).start for stage in range(layout.num_virtual_stages)]
    cut = engines.config.parallel.sequence_parallel
    return CompressorCheckpoint(engines.sync, engines.channel, layout, engines.topology.coordinates, layers, cut)


def _boxes(state: CompressorCheckpoint) -> Boxes:
    return [
        (name, shard.global_shape, box.offsets, box.tensor.clone())
        for name, shard in sorted(state.tensors(state.sync.topology.control.pg).items())
        for box in shard.boxes
    ]


def _save(changes: dict[str, dict[str, Any]], root: Path) -> Boxes:
    engines = tiny_engines(changes)
    tiny_train(engines, 2)
    state = _of(engines)
    group = engines.topology.control.pg
    save_checkpoint(root, 2, state.tensors(group), {}, "", group)
    return _boxes(state)


def _load(changes: dict[str, dict[str, Any]], root: Path) -> tuple[Boxes, list[str]]:
    engines = tiny_engines(changes)
    state = _of(engines)
    lines: list[str] = []
    state.load(root, 2, engines.topology.control.pg, lines.append)
    boxes = _boxes(state)
    tiny_train(engines, 1)
    return boxes, lines


def _sums(ranks: list[Boxes]) -> dict[str, Tensor]:
    """Every residual, summed over its holders."""
    totals: dict[str, Tensor] = {}
    for name, shape, offsets, piece in (box for boxes in ranks for box in boxes if box[0].endswith("|residual")):
        tensor = totals.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
        tensor[tuple(slice(o, o + s) for o, s in zip(offsets, piece.shape, strict=True))] = piece.double()
    assert all(torch.isfinite(tensor).all() for tensor in totals.values())
    return {name: tensor.sum(dim=0) for name, tensor in totals.items()}


def check_sums(loaded: list[tuple[Boxes, list[str]]], expected: dict[str, Tensor]) -> None:
    """Sums of residuals are as they were."""
    residuals = _sums([boxes for boxes, _ in loaded])
    assert residuals.keys() == expected.keys()
    for name, total in residuals.items():
        torch.testing.assert_close(total, expected[name], rtol=1e-12, atol=1e-12)


def _save_and_load(changes: dict[str, dict[str, Any]], root: Path) -> list[Boxes]:
    """The state of four ranks, of which all comes back."""
    saved = run_ranks(4, _save, changes, root)
    for before, (after, lines) in zip(saved, run_ranks(4, _load, changes, root), strict=True):
        assert lines == []
        assert [box[:3] for box in before] == [box[:3] for box in after]
        assert [a[0] for a, b in zip(before, after, strict=True) if not torch.equal(a[3], b[3])] == []
    return saved


def test_the_same_layout_restores_everything(tmp_path: Path) -> None:
    specs = ("dp-grad=powersgd,rank=2", "pp-backward=lowrank,rank=2,error-feedback=lazy", "embedding=powersgd,rank=2")
    saved = _save_and_load(_changes(*specs, pipeline_model_parallel_size=2), tmp_path)
    kinds = {name.rpartition("|")[2] for boxes in saved for name, *_ in boxes}
    assert kinds == {"residual", "q", "#draws"}


@pytest.mark.parametrize("factors", mark_repeats(["fp32", "fixpoint4"], keep=["fixpoint4"]))
def test_residuals_move_to_other_replicas_and_stages(factors: str, tmp_path: Path) -> None:
    spec = f"dp-grad=powersgd,rank=2,factors={factors}"
    saved = run_ranks(4, _save, _changes(spec), tmp_path)
    expected = _sums(saved)
    assert len(expected) > 8
    for layout in ({"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}):
        loaded = run_ranks(4, _load, _changes(spec, **layout), tmp_path)
        residuals = _sums([boxes for boxes, _ in loaded])
        assert residuals.keys() <= expected.keys()
        missing = {name for name in expected if name not in residuals}
        assert len(missing) < len(expected)
        for name, total in residuals.items():
            torch.testing.assert_close(total, expected[name], rtol=1e-12, atol=1e-12)
        assert all(bool(lines) == bool(missing or layout.get("tensor_model_parallel_size")) for _, lines in loaded)


def test_one_stage_with_the_embedding_may_compress_it(tmp_path: Path) -> None:
    """Its residual is saved with the other stage's empty one, and its factors by the name of the stage."""
    changes = _changes("dp-grad=powersgd,rank=2,stages=first:1", pipeline_model_parallel_size=2)
    saved = _save_and_load(changes, tmp_path)
    expected = _sums(saved)
    embedding = "compressor.dp-grad.embedding.word_embeddings.weight"
    assert expected[f"{embedding}|residual"].abs().max() > 0
    names = {name for boxes in saved for name, *_ in boxes}
    assert {name for name in names if "of2" in name} == {f"{embedding}.0of2|q", f"{embedding}.0of2|#draws"}
    other = run_ranks(2, _load, _changes("dp-grad=powersgd,rank=2"), tmp_path)
    residuals = _sums([boxes for boxes, _ in other])
    for name, total in expected.items():
        torch.testing.assert_close(residuals[name], total, rtol=1e-12, atol=1e-12)
    assert all("embedding.word_embeddings.weight.0of2 q" in lines[0] for _, lines in other)


OF_MATRICES, OF_BUCKETS = "dp-grad=powersgd,rank=2", "dp-grad=fixpoint,bits=3,error-feedback=on"


@pytest.mark.parametrize("spec", mark_repeats([OF_MATRICES, OF_BUCKETS], keep=[OF_BUCKETS]))
def test_residuals_of_experts_belong_to_their_replicas(spec: str, tmp_path: Path) -> None:
    """Of four ranks two hold an expert; on other layouts their sums are kept, as those of all others are."""
    experts = {"model": {"num_experts": [4], "expert_interval": 2}}

    def changes(**parallel: Any) -> dict[str, dict[str, Any]]:
        return _changes(spec, **parallel) | experts

    saved = run_ranks(4, _save, changes(expert_model_parallel_size=2), tmp_path)
    holders = {name: shape[0] for boxes in saved for name, shape, *_ in boxes if name.endswith("|residual")}
    assert {2 if ".experts." in name else 4 for name in holders} == {2, 4}
    assert all(count == (2 if ".experts." in name else 4) for name, count in holders.items())
    expected = _sums(saved)
    folded = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    for ranks, ep, options in ((4, 2, {}), (4, 4, {}), (4, 1, {}), (2, 1, {}), (4, 2, folded)):
        loaded = run_ranks(ranks, _load, changes(expert_model_parallel_size=ep, **options), tmp_path)
        check_sums(loaded, expected)


@pytest.mark.parametrize("spec", ["fixpoint,bits=3,error-feedback=on", "chunked-topk,chunk=64,k=8"])
def test_residuals_follow_their_parameters(spec: str, tmp_path: Path) -> None:
    """Buckets of another size, on another number of replicas."""
    spec = f"dp-grad={spec}"
    expected = _sums(run_ranks(4, _save, _changes(spec), tmp_path))
    small = _changes(spec, overlap_grad_reduce=True, ddp_bucket_size=2000)
    check_sums(run_ranks(2, _load, small, tmp_path), expected)


def test_chosen_coordinates_are_split_with_their_parameters(tmp_path: Path) -> None:
    spec = "dp-grad=stable-topk,density=0.2,interval=3"
    saved = run_ranks(4, _save, _changes(spec), tmp_path)
    expected = _masks(saved)
    assert all(0 < int(mask.sum()) < mask.numel() for mask in expected.values())
    for layout in ({"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {}):
        loaded = run_ranks(4, _load, _changes(spec, **layout), tmp_path)
        masks = _masks([boxes for boxes, _ in loaded])
        assert masks
        for name, mask in masks.items():
            assert torch.equal(mask, expected[name]), name


def _masks(ranks: list[Boxes]) -> dict[str, Tensor]:
    masks: dict[str, Tensor] = {}
    for name, shape, offsets, piece in (box for boxes in ranks for box in boxes if box[0].endswith("|indices")):
        mask = masks.setdefault(name, torch.full(shape, 9, dtype=torch.uint8))
        mask[tuple(slice(o, o + s) for o, s in zip(offsets, piece.shape, strict=True))] = piece
    return masks


Tables = dict[tuple[str, str], list[Tensor]]
"""Means and counts of tokens, by end and kind: those of all ranks."""


def _tables(ranks: list[Boxes]) -> Tables:
    tables: Tables = {}
    for name, _, _, table in (box for boxes in ranks for box in boxes if "|token-" in box[0]):
        end, _, kind = name.rpartition(".")[2].partition("|")
        tables.setdefault((end, kind), []).append(table[0, 0])
    return tables


PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2}
SPLIT: dict[str, Any] = {**PIPELINE, "tensor_model_parallel_size": 2}
CUT: dict[str, Any] = {**SPLIT, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("first", "resumed", "ranks"),
    mark_repeats(
        [(PIPELINE, PIPELINE, 2), (CUT, PIPELINE, 4), (CUT, SPLIT, 4), (PIPELINE, CUT, 4), (SPLIT, PIPELINE, 2)],
        keep=[(CUT, PIPELINE, 4), (PIPELINE, CUT, 4), (SPLIT, PIPELINE, 2)],
    ),
    ids=["fewer replicas", "replicas for a split sequence", "a whole sequence", "a split sequence", "fewer ranks"],
)
def test_means_of_tokens_are_averaged_on_another_layout(
    first: dict[str, Any], resumed: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    """Weighted by the visits of each rank, equally at both ends and on all ranks."""
    spec = "pp-forward=delta,bits=4,predict=token"
    saved = _tables(run_ranks(4, _save, _changes(spec, **first), tmp_path))
    loaded = run_ranks(ranks, _load, _changes(spec, **resumed), tmp_path)
    assert [lines for _, lines in loaded] == [[]] * ranks
    tables = _tables([boxes for boxes, _ in loaded])
    assert (
        tables.keys()
        == saved.keys()
        == {(e, f"token-{k}") for e in ("sender", "receiver") for k in ("means", "counts")}
    )
    means_vh, counts_v = saved["sender", "token-means"], saved["sender", "token-counts"]
    assert first == SPLIT or not torch.equal(means_vh[0], means_vh[1]), "the ranks hold equal means: nothing is tested"
    weight_v = torch.stack(counts_v).sum(dim=0)
    total_vh = torch.stack([n.unsqueeze(1) * m for m, n in zip(means_vh, counts_v, strict=True)]).sum(dim=0)
    expected = {
        "token-means": total_vh / weight_v.clamp(min=1).unsqueeze(1),
        "token-counts": torch.stack(counts_v).amax(0),
    }
    for kind, table in expected.items():
        rows = tables["sender", kind] + tables["receiver", kind]
        assert len(rows) == ranks
        assert all(torch.equal(other, rows[0]) for other in rows)
        torch.testing.assert_close(rows[0], table, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "layout", mark_repeats([PIPELINE, SPLIT, CUT], keep=[CUT]), ids=["dp2", "tp2", "split sequence"]
)
def test_means_of_tokens_are_unchanged_on_the_same_layout(layout: dict[str, Any], tmp_path: Path) -> None:
    _save_and_load(_changes("pp-forward=delta,bits=4,predict=token", **layout), tmp_path)


def test_state_without_a_place_is_named(tmp_path: Path) -> None:
    changes = _changes(
        "dp-grad=powersgd,rank=2", "pp-backward=lowrank,rank=2,error-feedback=lazy", pipeline_model_parallel_size=2
    )
    run_ranks(2, _save, changes, tmp_path)
    for _, lines in run_ranks(2, _load, _changes("dp-grad=powersgd,rank=2"), tmp_path):
        (line,) = lines
        assert "pp-backward.layer1.sender residual" in line
