"""Experts on any layout: the numbers of a single process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from megatron.compression.points import EXPERT_POINTS
from megatron.parallel.expert.dispatcher import RowExchange
from megatron.parallel.expert.router import Router
from megatron.training.assembly import Engines
from megatron.training.replica_check import disagreements
from tests.support.combinations import mark_repeats
from tests.support.spawn import run_ranks
from tests.support.tiny import ODD, Trace, merge, tiny_engines, tiny_run, tiny_train

Changes = dict[str, dict[str, Any]]

MOE: Changes = {
    "precision": {"fp64": True},
    "data": {"eod_mask_loss": True},
    "model": {
        "num_experts": [4, 8],
        "expert_interval": 2,
        "moe_z_loss_coeff": 1e-3,
        "moe_aux_loss_coeff": 0.05,
        "moe_input_jitter_eps": 0.05,
        "hidden_dropout": 0.1,
        "moe_shared_expert_intermediate_size": 24,
        "moe_shared_expert_gate": True,
    },
}
CAPACITY: Changes = {
    "model": {"moe_expert_capacity_factor": 0.75, "moe_min_capacity": 1, "moe_token_drop_policy": "position"},
}
BIASED: Changes = {
    "model": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.01,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_router_topk_scaling_factor": 1.5,
    },
}
RESIDUAL: Changes = {
    "model": {
        "mlp_type": "residual",
        "qk_layernorm": True,
        "moe_shared_expert_intermediate_size": None,
        "moe_shared_expert_gate": False,
        "moe_router_topk": 1,
        "swiglu": True,
        "add_bias_linear": False,
        "moe_expert_capacity_factor": 1.0,
        "moe_min_capacity": 1,
    },
}
GLOBAL: Changes = {
    "model": {
        "moe_router_score_function": "sqrtsoftplus",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.01,
        "moe_router_load_balancing_type": ["global_aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [0.5, 0.02],
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
    },
}
LAMB: Changes = {"optimizer": {"optimizer": "lamb", "lr": 1e-2}}
FORMS: dict[str, Changes] = {
    "standard": {},
    "capacity": CAPACITY,
    "biased": BIASED,
    "residual": RESIDUAL,
    "lamb": LAMB,
    "global": GLOBAL,
}


def _parallel(tp: int = 1, pp: int = 1, ep: int = 1, **options: Any) -> Changes:
    sizes = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
    }
    return {"parallel": {**sizes, **options}}


SP = {"sequence_parallel": True}
FOLDED = {"expert_tensor_parallel_size": 1}
DIST = {"use_distributed_optimizer": True}
OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 3000}
VIRTUAL = {"num_layers_per_virtual_pipeline_stage": 1}
UNIFORM = {"recompute": {"recompute_granularity": "full", "recompute_method": "uniform"}}

LAYOUTS: dict[int, dict[str, Changes]] = {
    2: {
        "tp2": _parallel(tp=2),
        "tp2 sp": _parallel(tp=2, **SP),
        "pp2": _parallel(pp=2),
        "dp2": _parallel(),
        "ep2": _parallel(ep=2),
        "ep2 sharded overlap recomputed": {**_parallel(ep=2, **DIST, **OVERLAP), **UNIFORM},
        "ep2 of tp2": _parallel(tp=2, ep=2, **FOLDED),
        "ep2 of tp2 sp": _parallel(tp=2, ep=2, **FOLDED, **SP),
    },
    4: {
        "ep4": _parallel(ep=4),
        "ep2 of dp4 sharded": _parallel(ep=2, **DIST),
        "ep2 tp2 sp overlap": _parallel(tp=2, ep=2, **SP, **OVERLAP),
        "ep2 pp2 virtual": _parallel(pp=2, ep=2, **VIRTUAL),
        "ep2 pp2 zb-h1": _parallel(pp=2, ep=2, pipeline_schedule="zb-h1"),
        "ep2 of tp2 dp2, sharded overlap recomputed": {
            **_parallel(tp=2, ep=2, **FOLDED, **DIST, **OVERLAP),
            **UNIFORM,
        },
        "ep4 of tp2 dp2 sp": _parallel(tp=2, ep=4, **FOLDED, **SP),
    },
    8: {
        "ep2 tp2 pp2": _parallel(tp=2, pp=2, ep=2),
        "ep4 of tp2 dp2, pp2": _parallel(tp=2, pp=2, ep=4, **FOLDED),
        "ep2 of dp4 pp2 sharded overlap zb-h1": _parallel(pp=2, ep=2, pipeline_schedule="zb-h1", **DIST, **OVERLAP),
        "ep2 of dp4 pp2 sharded gpipe": _parallel(pp=2, ep=2, pipeline_schedule="gpipe", **DIST),
    },
}


def _run_all(runs: dict[str, Changes], iterations: int) -> dict[str, Trace]:
    return {name: tiny_run(changes, iterations, masked=True) for name, changes in runs.items()}


# Except for "residual", the other forms have all parts of the standard one.
FORMS_ON: dict[str, tuple[int, dict[str, tuple[str, ...]]]] = {
    "2": (
        2,
        {
            "capacity": ("ep2 of tp2 sp",),
            "biased": ("pp2", "ep2"),
            "residual": ("tp2", "ep2 of tp2"),
            "lamb": ("ep2 of tp2",),
            "global": ("tp2 sp", "dp2", "ep2 sharded overlap recomputed"),
        },
    ),
    "2, others": (
        2,
        {
            "standard": ("tp2",),
            "capacity": ("tp2 sp", "ep2"),
            "residual": ("ep2 sharded overlap recomputed",),
            "global": ("ep2 of tp2 sp",),
        },
    ),
    "4": (
        4,
        {
            "standard": ("ep4", "ep4 of tp2 dp2 sp", "ep2 pp2 zb-h1"),
            "capacity": ("ep2 tp2 sp overlap",),
            "biased": ("ep2 of dp4 sharded",),
            "lamb": ("ep2 of dp4 sharded", "ep2 of tp2 dp2, sharded overlap recomputed"),
            "global": ("ep2 pp2 virtual",),
        },
    ),
    "8": (8, {"standard": tuple(LAYOUTS[8])}),
}


def _batch(world_size: int, changes: Changes) -> Changes:
    """Three micro-batches on each replica, an odd number; four where a schedule of several chunks wants an even one."""
    parallel = changes["parallel"]
    replicas = world_size // (parallel["tensor_model_parallel_size"] * parallel["pipeline_model_parallel_size"])
    return {"training": {"global_batch_size": (4 if VIRTUAL.keys() & parallel.keys() else 3) * replicas}}


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", mark_repeats(FORMS_ON, keep=["2", "4"]))
def test_layouts_agree(name: str) -> None:
    """Losses and norms of gradients in fp64: routing, capacity, both MLPs beside the experts, the layers' losses."""
    world_size, forms = FORMS_ON[name]
    cases = [(form, layout) for form, layouts in forms.items() for layout in layouts]
    assert "others" in name or {layout for _, layout in cases} == LAYOUTS[world_size].keys()
    batches = {layout: _batch(world_size, changes) for layout, changes in LAYOUTS[world_size].items()}
    runs = {
        f"{form}, {layout}": merge(MOE, ODD, batches[layout], FORMS[form], LAYOUTS[world_size][layout])
        for form, layout in cases
    }
    traces = run_ranks(world_size, _run_all, runs, 2, timeout=300.0)[0]
    references: dict[str, Trace] = {}
    for form, layout in cases:
        run, key = f"{form}, {layout}", f"{form}, {batches[layout]}"
        if key not in references:
            references[key] = tiny_run(merge(MOE, ODD, batches[layout], FORMS[form]), 2, masked=True)
        trace, reference = traces[run], references[key]
        assert all(step["moe loss"] > 0 for step in reference.named)
        assert trace.losses == pytest.approx(reference.losses, rel=1e-10, abs=0), run
        assert trace.grad_norms == pytest.approx(reference.grad_norms, rel=1e-10, abs=0), run
        for losses, theirs in zip(trace.named, reference.named, strict=True):
            assert losses == pytest.approx(theirs, rel=1e-10), run


CODED: Changes = {
    "precision": {"fp64": False},
    "optimizer": {"lr": 1e-3},
    "model": {"hidden_size": 64, "moe_input_jitter_eps": 0.0, "hidden_dropout": 0.0},
}
HIDDEN = 64
EXPERT_LEGS_IN_ORDER = [point.value for point in EXPERT_POINTS]
_8, _4 = HIDDEN + 4, HIDDEN // 2 + 4  # and a scale of 32 bits for 64 numbers
BYTES_OF_A_ROW: dict[str, dict[str, int]] = {
    "8 bits": dict.fromkeys(EXPERT_LEGS_IN_ORDER, _8),
    "two legs": {"ep-dispatch-forward": _8, "ep-combine-backward": _4},
    "e4m3, e5m2": {"ep-dispatch-forward": _8, "ep-combine-backward": _8},
    "default": dict(zip(EXPERT_LEGS_IN_ORDER, (_8, 2 * HIDDEN, 2 * HIDDEN, _8), strict=True)),
    "aggressive": dict(zip(EXPERT_LEGS_IN_ORDER, (_4, _8, _8, _4), strict=True)),
}
SPECS = {
    "exact": [],
    "8 bits": ["ep-dispatch=fixpoint,bits=8,group=64", "ep-combine=fixpoint,bits=8,group=64"],
    "two legs": ["ep-dispatch-forward=fixpoint,bits=8,group=64", "ep-combine-backward=fixpoint,bits=4,rotation=64"],
    "e4m3, e5m2": ["ep-dispatch-forward=float8,format=e4m3,tile=64", "ep-combine-backward=float8,format=e5m2,tile=64"],
    "default": ["experts=default"],
    "aggressive": ["experts=aggressive"],
    "later": ["ep-dispatch=fixpoint,bits=2,group=64,warmup=2"],
}


def _rows_sent(counted: list[Any]) -> mock._patch[Any]:
    """Notes the rows that this rank sends to others at each dispatch."""
    exchange = RowExchange.exchange_counts

    def noting(comm: RowExchange, counts_re: Any) -> Any:
        sent = counts_re.sum(1).tolist()
        came_re = exchange(comm, counts_re)
        received = came_re.sum(1).tolist()
        rank = comm.group.rank
        counted.append((sum(sent) - sent[rank], sum(received) - received[rank]))
        return came_re

    return mock.patch.object(RowExchange, "exchange_counts", noting)


def _run_coded(runs: dict[str, Changes], iterations: int) -> dict[str, tuple[Trace, int, int]]:
    """Each run's trace, and the rows that this rank has sent to and got from others at its dispatches."""
    results = {}
    for name, changes in runs.items():
        counted: list[tuple[int, int]] = []
        with _rows_sent(counted):
            trace = tiny_run(changes, iterations)
        results[name] = (trace, sum(sent for sent, _ in counted), sum(received for _, received in counted))
    return results


@pytest.mark.multiprocess
def test_expert_legs_send_coded_rows() -> None:
    """Bytes are counts times those of a row, on each leg alone; eight bits hardly change losses."""
    runs = {name: merge(MOE, CODED, _parallel(ep=2), {"compression": {"compress": s}}) for name, s in SPECS.items()}
    for results in run_ranks(2, _run_coded, runs, 4):
        for name, (trace, sent, received) in results.items():
            rows = dict(zip(EXPERT_LEGS_IN_ORDER, (sent, received, received, sent), strict=True))
            assert min(rows.values()) > 100
            for point, count in rows.items():
                assert trace.raw_by_point[point] == count * HIDDEN * 4, (name, point)
                wire = BYTES_OF_A_ROW.get(name, {}).get(point, HIDDEN * 4)
                if name != "later":
                    assert trace.bytes_by_point[point] == count * wire, (name, point)
        exact = results["exact"][0].losses
        assert results["8 bits"][0].losses == pytest.approx(exact, rel=2e-3)
        assert results["8 bits"][0].losses != exact
        assert results["e4m3, e5m2"][0].losses == pytest.approx(exact, rel=5e-3)
        assert results["default"][0].losses == pytest.approx(exact, rel=2e-3)
        assert results["aggressive"][0].losses == pytest.approx(exact, rel=5e-3)
        assert results["later"][0].losses[:2] == exact[:2]
        assert results["later"][0].losses[3:] != exact[3:]


def _checked() -> list[list[str]]:
    """Findings of ``--check-replicas`` before and after a tensor-parallel rank chooses other experts."""
    engines = tiny_engines(merge(MOE, BIASED, _parallel(tp=2)))
    rank, differences = engines.topology.tp.rank, []

    def after(engines: Engines) -> None:
        differences.append(disagreements(engines))
        for module in engines.stages[0].modules():
            if isinstance(module, Router) and module.expert_bias is not None and rank == 1:
                module.expert_bias += torch.linspace(0.5, -0.5, module.experts)

    tiny_train(engines, 2, after_step=after)
    return differences


@pytest.mark.multiprocess
def test_tensor_parallel_ranks_with_other_experts_are_reported() -> None:
    for right, wrong in run_ranks(2, _checked):
        assert right == []
        names = {text.partition(" on rank")[0] for text in wrong}
        assert "layers.1.mlp.router.expert_bias" in names
        assert "the routing of layer 2, micro-batch 1 of replica 0" in names
