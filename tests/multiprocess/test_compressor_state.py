"""What compressors remember, on another layout: sums of residuals are kept, and what is lost is named."""

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
from tests.support.spawn import run_ranks
from tests.support.tiny import tiny_engines, tiny_train

Boxes = list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]


def _changes(*specs: str, **parallel: Any) -> dict[str, dict[str, Any]]:
    return {
        "parallel": parallel,
        "compression": {"compress": list(specs)},
        "training": {"global_batch_size": 8},
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
    tiny_train(engines, 4)
    state = _of(engines)
    group = engines.topology.control.pg
    save_checkpoint(root, 4, state.tensors(group), {}, "", group)
    return _boxes(state)


def _load(changes: dict[str, dict[str, Any]], root: Path) -> tuple[Boxes, list[str]]:
    engines = tiny_engines(changes)
    state = _of(engines)
    lines: list[str] = []
    state.load(root, 4, engines.topology.control.pg, lines.append)
    boxes = _boxes(state)
    tiny_train(engines, 2)
    return boxes, lines


def _sums(ranks: list[Boxes]) -> dict[str, Tensor]:
    """Every residual, summed over its holders."""
    whole: dict[str, Tensor] = {}
    for name, shape, offsets, part in (box for boxes in ranks for box in boxes if box[0].endswith("|residual")):
        tensor = whole.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
        tensor[tuple(slice(o, o + s) for o, s in zip(offsets, part.shape, strict=True))] = part.double()
    assert all(torch.isfinite(tensor).all() for tensor in whole.values())
    return {name: tensor.sum(dim=0) for name, tensor in whole.items()}


def test_the_same_layout_gets_everything_back(tmp_path: Path) -> None:
    specs = ("dp-grad=powersgd,rank=2", "pp-backward=lowrank,rank=2,error-feedback=lazy", "embedding=powersgd,rank=2")
    changes = _changes(*specs, pipeline_model_parallel_size=2)
    saved = run_ranks(4, _save, changes, tmp_path)
    loaded = run_ranks(4, _load, changes, tmp_path)
    for before, (after, lines) in zip(saved, loaded, strict=True):
        assert lines == []
        assert [box[:3] for box in before] == [box[:3] for box in after]
        assert [a[0] for a, b in zip(before, after, strict=True) if not torch.equal(a[3], b[3])] == []
    kinds = {name.rpartition("|")[2] for boxes in saved for name, *_ in boxes}
    assert kinds == {"residual", "q", "#draws"}


@pytest.mark.parametrize("factors", ["fp32", "fixpoint4"])
def test_other_replicas_share_the_residuals_and_other_stages_take_theirs(factors: str, tmp_path: Path) -> None:
    spec = f"dp-grad=powersgd,rank=2,factors={factors}"
    saved = run_ranks(4, _save, _changes(spec), tmp_path)
    wanted = _sums(saved)
    assert len(wanted) > 8
    for layout in ({"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}):
        loaded = run_ranks(4, _load, _changes(spec, **layout), tmp_path)
        found = _sums([boxes for boxes, _ in loaded])
        assert found.keys() <= wanted.keys()
        missing = {name for name in wanted if name not in found}
        assert len(missing) < len(wanted)
        for name, total in found.items():
            torch.testing.assert_close(total, wanted[name], rtol=1e-12, atol=1e-12)
        assert all(bool(lines) == bool(missing or layout.get("tensor_model_parallel_size")) for _, lines in loaded)


def test_one_of_the_stages_that_hold_the_embedding_may_compress_it(tmp_path: Path) -> None:
    """Its residual is saved with the other's, which is nothing, and its factors by the name of the stage."""
    changes = _changes("dp-grad=powersgd,rank=2,stages=first:1", pipeline_model_parallel_size=2)
    saved = run_ranks(4, _save, changes, tmp_path)
    wanted = _sums(saved)
    embedding = "compressor.dp-grad.embedding.word_embeddings.weight"
    assert wanted[f"{embedding}|residual"].abs().max() > 0
    same = run_ranks(4, _load, changes, tmp_path)
    for before, (after, lines) in zip(saved, same, strict=True):
        assert lines == []
        assert [box[:3] for box in before] == [box[:3] for box in after]
        assert [a[0] for a, b in zip(before, after, strict=True) if not torch.equal(a[3], b[3])] == []
    names = {name for boxes in saved for name, *_ in boxes}
    assert {name for name in names if "of2" in name} == {f"{embedding}.0of2|q", f"{embedding}.0of2|#draws"}
    other = run_ranks(2, _load, _changes("dp-grad=powersgd,rank=2"), tmp_path)
    found = _sums([boxes for boxes, _ in other])
    for name, total in wanted.items():
        torch.testing.assert_close(found[name], total, rtol=1e-12, atol=1e-12)
    assert all("embedding.word_embeddings.weight.0of2 q" in lines[0] for _, lines in other)


@pytest.mark.parametrize("spec", ["dp-grad=powersgd,rank=2", "dp-grad=fixpoint,bits=3,error-feedback=on"])
def test_residuals_of_experts_belong_to_their_replicas(spec: str, tmp_path: Path) -> None:
    """Of four ranks two hold an expert; on other layouts their sums are kept, as those of all others are."""
    experts = {"model": {"num_experts": [4], "expert_interval": 2}}

    def changes(**parallel: Any) -> dict[str, dict[str, Any]]:
        return _changes(spec, **parallel) | experts

    saved = run_ranks(4, _save, changes(expert_model_parallel_size=2), tmp_path)
    holders = {name: shape[0] for boxes in saved for name, shape, *_ in boxes if name.endswith("|residual")}
    assert {2 if ".experts." in name else 4 for name in holders} == {2, 4}
    assert all(count == (2 if ".experts." in name else 4) for name, count in holders.items())
    wanted = _sums(saved)
    folded = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    for ranks, ep, more in ((4, 2, {}), (4, 4, {}), (4, 1, {}), (2, 1, {}), (4, 2, folded)):
        loaded = run_ranks(ranks, _load, changes(expert_model_parallel_size=ep, **more), tmp_path)
        found = _sums([boxes for boxes, _ in loaded])
        assert found.keys() == wanted.keys()
        for name, total in found.items():
            torch.testing.assert_close(total, wanted[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spec", ["fixpoint,bits=3,error-feedback=on", "chunked-topk,chunk=64,k=8"])
def test_residuals_follow_their_parameters(spec: str, tmp_path: Path) -> None:
    """Buckets of another size, on another number of replicas."""
    spec = f"dp-grad={spec}"
    wanted = _sums(run_ranks(4, _save, _changes(spec), tmp_path))
    small = _changes(spec, overlap_grad_reduce=True, ddp_bucket_size=2000)
    found = _sums([boxes for boxes, _ in run_ranks(2, _load, small, tmp_path)])
    assert found.keys() == wanted.keys()
    for name, total in found.items():
        torch.testing.assert_close(total, wanted[name], rtol=1e-12, atol=1e-12)


def test_choices_of_coordinates_are_cut_with_their_parameters(tmp_path: Path) -> None:
    spec = "dp-grad=stable-topk,density=0.2,interval=3"
    saved = run_ranks(4, _save, _changes(spec), tmp_path)
    wanted = _masks(saved)
    assert all(0 < int(mask.sum()) < mask.numel() for mask in wanted.values())
    for layout in ({"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {}):
        loaded = run_ranks(4, _load, _changes(spec, **layout), tmp_path)
        found = _masks([boxes for boxes, _ in loaded])
        assert found
        for name, mask in found.items():
            assert torch.equal(mask, wanted[name]), name


def _masks(ranks: list[Boxes]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for name, shape, offsets, part in (box for boxes in ranks for box in boxes if box[0].endswith("|indices")):
        mask = whole.setdefault(name, torch.full(shape, 9, dtype=torch.uint8))
        mask[tuple(slice(o, o + s) for o, s in zip(offsets, part.shape, strict=True))] = part
    return whole


Tables = dict[tuple[str, str], list[Tensor]]
"""Means and counts of tokens, by end and kind: those of all ranks."""


def _tables(ranks: list[Boxes]) -> Tables:
    found: Tables = {}
    for name, _, _, part in (box for boxes in ranks for box in boxes if "|token-" in box[0]):
        end, _, kind = name.rpartition(".")[2].partition("|")
        found.setdefault((end, kind), []).append(part[0, 0])
    return found


PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2}
SPLIT: dict[str, Any] = {**PIPELINE, "tensor_model_parallel_size": 2}
CUT: dict[str, Any] = {**SPLIT, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("first", "then", "ranks"),
    [(PIPELINE, PIPELINE, 2), (CUT, PIPELINE, 4), (CUT, SPLIT, 4), (PIPELINE, CUT, 4), (SPLIT, PIPELINE, 2)],
    ids=["fewer replicas", "replicas for a split sequence", "a whole sequence", "a split sequence", "fewer ranks"],
)
def test_means_of_tokens_are_averaged_on_another_layout(
    first: dict[str, Any], then: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    """By what each rank has seen, equally at both ends and on all ranks."""
    spec = "pp-forward=delta,bits=4,predict=token"
    saved = _tables(run_ranks(4, _save, _changes(spec, **first), tmp_path))
    loaded = run_ranks(ranks, _load, _changes(spec, **then), tmp_path)
    assert [lines for _, lines in loaded] == [[]] * ranks
    found = _tables([boxes for boxes, _ in loaded])
    assert (
        found.keys() == saved.keys() == {(e, f"token-{k}") for e in ("sender", "receiver") for k in ("means", "counts")}
    )
    means_vh, counts_v = saved["sender", "token-means"], saved["sender", "token-counts"]
    assert first == SPLIT or not torch.equal(means_vh[0], means_vh[1]), "the ranks hold equal means: nothing is tested"
    weight_v = torch.stack(counts_v).sum(dim=0)
    total_vh = torch.stack([n.unsqueeze(1) * m for m, n in zip(means_vh, counts_v, strict=True)]).sum(dim=0)
    wanted = {
        "token-means": total_vh / weight_v.clamp(min=1).unsqueeze(1),
        "token-counts": torch.stack(counts_v).amax(0),
    }
    for kind, table in wanted.items():
        held = found["sender", kind] + found["receiver", kind]
        assert len(held) == ranks
        assert all(torch.equal(other, held[0]) for other in held)
        torch.testing.assert_close(held[0], table, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", [PIPELINE, SPLIT, CUT], ids=["dp2", "tp2", "split sequence"])
def test_means_of_tokens_stay_what_they_are_on_the_same_layout(layout: dict[str, Any], tmp_path: Path) -> None:
    changes = _changes("pp-forward=delta,bits=4,predict=token", **layout)
    saved = run_ranks(4, _save, changes, tmp_path)
    for before, (after, lines) in zip(saved, run_ranks(4, _load, changes, tmp_path), strict=True):
        assert lines == []
        assert [box[:3] for box in before] == [box[:3] for box in after]
        assert all(torch.equal(a[3], b[3]) for a, b in zip(before, after, strict=True))


def test_what_has_no_place_is_named(tmp_path: Path) -> None:
    changes = _changes(
        "dp-grad=powersgd,rank=2", "pp-backward=lowrank,rank=2,error-feedback=lazy", pipeline_model_parallel_size=2
    )
    run_ranks(2, _save, changes, tmp_path)
    for _, lines in run_ranks(2, _load, _changes("dp-grad=powersgd,rank=2"), tmp_path):
        (line,) = lines
        assert "pp-backward.layer2.sender residual" in line
