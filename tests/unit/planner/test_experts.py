"""Plans of models with experts: FLOPs, rows, imbalance, and the search."""

from __future__ import annotations

import dataclasses
import itertools
import json
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.base.errors import UserError
from megatron.distributed.policy import CompressionPlan
from megatron.planner.choice import Choice
from megatron.planner.cluster import LinkSpec, write_cluster
from megatron.planner.command import imbalance_of, main
from megatron.planner.dry_run import DryBackend, DryExpertComm, ExpertLoad
from megatron.planner.predict import Predictor
from megatron.planner.search import EXPERT_SETS, SPEC_SETS, choices, with_experts
from megatron.training.flops import model_flops_per_sample
from megatron.training.report import model_shape
from tests.unit.planner.support import CLUSTER, VOCAB, predictor_of, small_run

MOE: dict[str, Any] = {"num_experts": [8, 8, 16, 16], "expert_interval": 2, "moe_ffn_hidden_size": 128}


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["one by one", "grouped"])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (1, 4), (2, 2)])
def test_operations_are_what_the_formula_counts(precision: dict[str, Any], tp: int, ep: int) -> None:
    beside = {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_gate": True, "swiglu": True}
    layout = {"tensor_model_parallel_size": tp, "expert_model_parallel_size": ep}
    config = small_run(model={**MOE, **beside}, parallel=layout, precision=precision)
    predictor, choice = predictor_of(config)
    total = 0.0
    for name, count in predictor.contents(choice, 0).items():
        piece = predictor.book.piece(choice, name)
        total += count * (piece.forward.flops + piece.backward.flops)
    again = config.model.num_layers * 2 * config.model.seq_length**2 * config.model.hidden_size
    tokens, layers = config.model.seq_length, len(config.model.expert_layers)
    # Weighing a token's rows is products, too: forward, and backward to the weights; rows' own gradients are none.
    weighing = layers * 2 * 2 * tokens * config.model.moe_router_topk * config.model.hidden_size
    # Each tensor-parallel rank has the router and the gate whole.
    small = sum(2 * 3 * tokens * config.model.hidden_size * (n + 1) for n in config.model.expert_layers.values())
    expected = model_flops_per_sample(model_shape(config, 1024), causal=False) + again
    assert total * tp == pytest.approx(expected + tp * weighing + (tp - 1) * small, rel=2e-3)


def _comm(expert_load: ExpertLoad, size: int = 4) -> DryExpertComm:
    backend = DryBackend(CLUSTER.device)
    comm = backend.experts(size, backend.recorder(), CompressionPlan({}), expert_load, folded=False)
    assert isinstance(comm, DryExpertComm)
    return comm


def test_one_expert_is_fuller_than_the_others() -> None:
    comm = _comm(ExpertLoad(2.5))
    counts = comm.count_rows(torch.empty(100, 2, device="meta"), 8)
    assert counts.tolist() == [62, 20, 20, 20, 20, 20, 19, 19]
    assert comm.count_rows(torch.empty(200, device="meta"), 8, 20).tolist() == [20, 20, 20, 20, 20, 20, 19, 19]
    came_re = comm.ranks.exchange_counts(counts.view(4, 2))
    assert came_re.tolist() == [[62, 20]] * 4


def _expected(tokens: int, k: int, experts: int, nodes: int, full: float, kept: float) -> list[float]:
    """Rows of each node, by looking at all choices: the first expert is chosen with the probability ``full``."""
    ways = list(itertools.combinations(range(experts), k))
    with_first = [way for way in ways if 0 in way]
    rows = [0.0] * nodes
    for way in ways:
        chance = full / len(with_first) if 0 in way else (1 - full) / (len(ways) - len(with_first))
        stays = [(chance * kept, way), (chance * (1 - kept), tuple(e for e in way if e))]
        for part, experts_there in stays if 0 in way else [(chance, way)]:
            for node in {e // (experts // nodes) for e in experts_there}:
                rows[node] += tokens * part
    return rows


@pytest.mark.parametrize(("imbalance", "k", "nodes"), [(1.0, 2, 2), (1.0, 3, 4), (2.5, 2, 4), (2.0, 4, 2), (1.0, 8, 2)])
def test_rows_of_a_node_are_those_of_all_choices(imbalance: float, k: int, nodes: int) -> None:
    """A token with several experts on a node is one row, and its choices are as many as in one stage."""
    tokens, experts = 10_000, 8
    comm = _comm(ExpertLoad(imbalance, nodes), 8)
    chosen = torch.empty(tokens, k, device="meta")
    full = imbalance * k / experts
    for most in (None, round(0.75 * full * tokens)):
        rows_n, choices_n = comm.count_by_node(chosen, chosen, experts, most)
        kept = 1.0 if most is None else most / (full * tokens)
        if imbalance > 1 or most is None:  # or all experts were full
            wanted = _expected(tokens, k, experts, nodes, full, kept)
            assert rows_n.tolist() == pytest.approx(wanted, abs=1.0)
        counts = comm.count_rows(chosen, experts, most)
        assert choices_n.tolist() == counts.view(nodes, -1).sum(1).tolist()
        assert (rows_n <= choices_n).all()
        # Those that come to the first node, of as many ranks as there are nodes.
        local, most_here = experts // nodes, None if most is None else nodes * most
        here = comm.count_rows(torch.empty(0, device="meta"), local, most_here, nodes * int(choices_n[0]))
        assert here.tolist() == pytest.approx([nodes * count for count in counts[:local].tolist()], abs=2 * nodes)


def test_imbalance_costs_time_and_memory_but_no_bytes() -> None:
    parallel = {"expert_model_parallel_size": 8, "moe_two_stage": "off"}
    wide = {**MOE, "num_experts": [8], "moe_ffn_hidden_size": 4096, "seq_length": 512}
    config = small_run(model=wide, parallel=parallel)
    even, choice = predictor_of(config)
    uneven = Predictor(config, CLUSTER, VOCAB, 3.0)
    one, other = even.predict(choice), uneven.predict(choice)
    assert one.sent == other.sent
    assert other.parts["compute"] > 1.5 * one.parts["compute"]
    assert other.parts["expert parallel"] > 1.5 * one.parts["expert parallel"]
    assert other.memory["activations"] > 1.5 * one.memory["activations"]
    assert other.mfu < one.mfu


def test_legs_cost_what_their_rows_hold() -> None:
    legs = ("ep-dispatch-forward", "ep-dispatch-backward", "ep-combine-forward", "ep-combine-backward")
    parallel = {"expert_model_parallel_size": 4}
    exact, choice = predictor_of(small_run(model=MOE, parallel=parallel))
    coded, chosen = predictor_of(
        small_run(model=MOE, parallel=parallel, specs=("ep-dispatch=fixpoint,bits=8,group=64",))
    )
    plain, small = exact.predict(choice), coded.predict(chosen)
    micro_batches, rows, h = 4, 32 * 2 * 3 // 4, 64
    for leg in legs:
        assert plain.sent[leg] == 4 * micro_batches * rows * h * 4
        # Eight ranks on two nodes: two of the three other ranks that share experts are in this one's.
        assert small.sent[leg] == (4 * micro_batches * rows * (h + 4) if "dispatch" in leg else plain.sent[leg])
    assert plain.across == {point: nbytes for point, nbytes in plain.across.items() if point == "dp-grad"}
    assert small.parts["coding"] > plain.parts["coding"]
    assert small.parts["expert parallel"] < plain.parts["expert parallel"]
    one_stage = {"expert_model_parallel_size": 8, "moe_two_stage": "off"}
    eight, split = predictor_of(small_run(model=MOE, parallel=one_stage))
    found = eight.predict(split)
    for leg in legs:
        assert found.across[leg] == pytest.approx(found.sent[leg] * 4 / 7)


def test_rows_in_two_stages_cross_once_to_a_node() -> None:
    """And are coded there alone; nodes of single ranks are asked for."""
    legs = ("ep-dispatch-forward", "ep-dispatch-backward", "ep-combine-forward", "ep-combine-backward")
    model = {**MOE, "num_experts": [8], "expert_interval": 1, "moe_router_topk": 4}
    specs = ("ep-dispatch=fixpoint,bits=8,group=64", "ep-combine=fixpoint,bits=8,group=64")
    eight = {"expert_model_parallel_size": 8}
    plain, choice = predictor_of(small_run(model=model, parallel=eight))
    coded, chosen = predictor_of(small_run(model=model, parallel=eight, specs=specs))
    once, _ = predictor_of(small_run(model=model, parallel={**eight, "moe_two_stage": "off"}))
    tokens, layers, micro_batches, h = 32, 8, 4, 64
    across = round(tokens * (1 - comb(4, 4) / comb(8, 4)))
    inside = tokens * 4 * 3 // 4
    for leg in legs:
        assert plain.predict(choice).across[leg] == layers * micro_batches * across * h * 4
        assert plain.predict(choice).sent[leg] == layers * micro_batches * (across + inside) * h * 4
        assert coded.predict(chosen).sent[leg] == layers * micro_batches * (across * (h + 4) + inside * h * 4)
    # Of two hops of all-to-alls: of counts, choices with their weights' gradients, and of rows four times.
    waits = 7 * 1 * 20e-6 + 5 * 3 * 5e-6
    between = (4 * across * h * 4 + 8 + (8 + 4) * tokens * 4 // 2) / (40e9 / 8 / 4)
    hop = (4 * inside * h * 4 + 3 * 4) / (400e9 / 8)
    took = layers * micro_batches * (waits + between + hop)
    assert plain.predict(choice).parts["expert parallel"] == pytest.approx(took, rel=1e-9)
    assert took < once.predict(choice).parts["expert parallel"]
    alone = dataclasses.replace(CLUSTER, gpus_per_node=1)
    for asked, rows in (("auto", tokens * 4 * 7 // 8), ("on", tokens * 4 * 7 // 8), ("off", tokens * 4 * 7 // 8)):
        run = small_run(model=model, parallel={**eight, "moe_two_stage": asked})
        found = predictor_of(run, alone)[0].predict(choice)
        assert found.sent[legs[0]] == layers * micro_batches * rows * h * 4, asked


def test_whole_experts_are_planned() -> None:
    """Tensor-parallel ranks send their own tokens, hold whole experts, and reduce them among fewer."""
    sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 4}
    folded, choice = predictor_of(small_run(model=MOE, parallel={**sizes, "expert_tensor_parallel_size": 1}))
    assert choice.folded
    assert (choice.expert_ranks, choice.expert_dp) == (4, 2)
    split = dataclasses.replace(choice, ep=2, folded=False)
    assert (split.expert_ranks, split.expert_dp) == (4, 2)
    whole, parts = folded.predict(choice), folded.predict(split)
    assert [replicas for _, replicas in folded.count_replicas(choice, 0)] == [4, 2]
    # The other products' biases are in parts, too; a row-parallel bias is whole.
    assert folded.count_replicas(choice, 0)[1][0] == (2 * 8 + 2 * 16) // 4 * (2 * 64 * 128 + 128 + 64)
    rows = 32 * 2 // 2 * 3 // 4
    assert whole.sent["ep-dispatch-forward"] == 4 * choice.micro_batches * rows * 64 * 4
    assert parts.sent["ep-dispatch-forward"] == 4 * choice.micro_batches * (32 * 2 // 2) * 64 * 4
    assert whole.sent["tp-forward"] < parts.sent["tp-forward"]  # no gather before experts


def test_experts_are_reduced_over_the_replicas_that_hold_them() -> None:
    predictor, choice = predictor_of(small_run(model=MOE, parallel={"expert_model_parallel_size": 8}))
    whole = dataclasses.replace(choice, ep=1)
    own = sum(count for count, replicas in predictor.count_replicas(choice, 0) if replicas == 1)
    shared = predictor.elements(choice, 0) - own
    assert own == (2 * 8 + 2 * 16) // 8 * (2 * 64 * 128 + 128 + 64)
    # Parts that fill up groups of ranks come on top.
    assert predictor.predict(choice).sent["dp-grad"] == pytest.approx(2 * 7 / 8 * 4 * shared, rel=1e-3)
    assert predictor.predict(whole).sent["dp-grad"] == pytest.approx(2 * 7 / 8 * 4 * (shared + 8 * own), rel=1e-3)
    pairs = dataclasses.replace(choice, ep=4)
    wanted = 2 * 7 / 8 * 4 * shared + 2 * 1 / 2 * 4 * 2 * own
    assert predictor.predict(pairs).sent["dp-grad"] == pytest.approx(wanted, rel=1e-3)
    memory = predictor.predict(choice).memory
    assert memory["optimizer"] == 8 * (shared + own)
    sharded = predictor.predict(dataclasses.replace(choice, sharded=True)).memory
    assert sharded["optimizer"] == 8 * (shared / 8 + own)


def test_muon_shares_out_each_matrix_among_the_replicas_that_hold_it() -> None:
    """Those of experts among fewer than the others: their moments, their work, and the bytes that join them."""
    parallel = {"expert_model_parallel_size": 8}
    predictor, choice = predictor_of(small_run(model=MOE, parallel=parallel, optimizer={"optimizer": "muon"}))
    adam, _ = predictor_of(small_run(model=MOE, parallel=parallel))

    def owned(**changes: Any) -> float:
        """Matrices that a device updates: they have one moment of four bytes, where Adam has two."""
        one = dataclasses.replace(choice, **changes)
        return (adam.predict(one).memory["optimizer"] - predictor.predict(one).memory["optimizer"]) / 4

    own = (2 * 8 + 2 * 16) // 8 * 2 * 64 * 128
    shared = owned() - own
    assert owned(ep=1) == shared + 8 * own
    assert owned(sharded=True) == shared / 8 + own
    assert owned(sharded=True, ep=2) == shared / 8 + own
    assert owned(sharded=True, ep=1) == (shared + 8 * own) / 8
    for ep in (8, 4, 1):
        sent = predictor.predict(dataclasses.replace(choice, sharded=True, ep=ep)).sent["optimizer"]
        # Each matrix goes to its owner and back, but for what the owner holds: tests of training have the bytes.
        assert 0 < sent < 2 * 4 * owned(sharded=True, ep=ep)
    seconds = {
        ep: sum(part.flops for part in predictor.matrices(dataclasses.replace(choice, sharded=True, ep=ep), 0))
        for ep in (1, 8)
    }
    # As many experts, whoever holds them; the busiest device has a few matrices more or less.
    assert seconds[8] == pytest.approx(seconds[1], rel=0.1)


def test_expert_parallel_sizes_are_searched() -> None:
    config = small_run(model=MOE)
    found = list(choices(config, CLUSTER, with_experts(config.model, SPEC_SETS)))
    assert {one.ep for one in found} == {1, 2, 4, 8}
    assert all(one.tp * one.dp % one.expert_ranks == 0 for one in found)
    assert all(one.ep % one.tp == 0 and one.tp > 1 for one in found if one.folded)
    assert {(one.tp, one.ep) for one in found if one.folded} == {(2, 2), (2, 4), (2, 8), (4, 4), (4, 8)}
    assert all((one.ep > 1) or not any(spec.startswith("ep-") for spec in one.specs) for one in found)
    tried = {tuple(spec for spec in one.specs if spec.startswith("ep-")) for one in found if one.ep > 1}
    assert tried == {(), *EXPERT_SETS}
    assert not any(spec.startswith("ep-") for one in with_experts(small_run().model, SPEC_SETS) for spec in one)


def test_slow_links_call_for_rows_in_few_bits() -> None:
    """And on fast ones, the coding is not worth it; sharing experts saves their memory."""
    model = {"num_layers": 2, "num_experts": [8], "moe_ffn_hidden_size": 4096}
    config = small_run(model=model, parallel={"expert_model_parallel_size": 8}, precision={"bf16": True})
    plain, whole = (Choice(1, 1, 8, ep=ep, micro_batch=4) for ep in (8, 1))
    coded = dataclasses.replace(plain, specs=EXPERT_SETS[1])
    for rate, pays in ((1000.0, False), (0.05, True)):
        cluster = dataclasses.replace(CLUSTER, across=LinkSpec(rate, 20.0), gpus_per_node=1)
        predictor = Predictor(config, cluster, VOCAB)
        assert (predictor.predict(coded).seconds < predictor.predict(plain).seconds) is pays
        assert predictor.predict(plain).memory_bytes < predictor.predict(whole).memory_bytes / 4


def _log(folder: Path, *lines: str) -> str:
    (folder / "log.jsonl").write_text("\n".join(lines))
    return str(folder / "log.jsonl")


def test_the_imbalance_is_given_or_read_from_a_log(tmp_path: Path) -> None:
    model = small_run(model=MOE).model
    assert imbalance_of("1.5", model) == 1.5
    lines = [json.dumps({"kind": "train", "expert_imbalance": value}) for value in (3.0, 1.75)]
    assert imbalance_of(_log(tmp_path, *lines, '{"kind": "end"}', '{"kind": "tr'), model) == 1.75
    for text, says in (
        ("0.5", "at least 1, and at most 4"),
        ("4.5", "at least 1, and at most 4"),
        ("nan", "--expert-imbalance"),
        ("much", "no file, either"),
        (_log(tmp_path, "{}"), "no line says expert_imbalance"),
    ):
        with pytest.raises(UserError, match=says):
            imbalance_of(text, model)
    with pytest.raises(UserError, match="no layer has experts"):
        imbalance_of("2", small_run().model)


def test_the_command_plans_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, cluster = tmp_path / "run.yaml", tmp_path / "cluster.yaml"
    model = {"num_layers": 2, "num_experts": [4], "moe_ffn_hidden_size": 128}
    run = small_run(4, model=model, training={"global_batch_size": 4}, parallel={"expert_model_parallel_size": 4})
    config.write_text(run.to_yaml())
    cluster.write_text(write_cluster(dataclasses.replace(CLUSTER, gpus=4)))
    words = ["--config", str(config), "--cluster", str(cluster), "--expert-imbalance", "1.5"]
    assert main([*words, "--specs", "", "--top", "1", "--write", str(tmp_path / "best.yaml")]) == 0
    shown = capsys.readouterr().out
    assert "tp 1, pp 1, dp 4, ep 4" in shown
    assert "ep-dispatch-forward: " in shown
    assert main(["--config", str(tmp_path / "best.yaml"), "--cluster", str(cluster), "--no-search"]) == 0
    folded = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 4}
    config.write_text(small_run(4, model=model, training={"global_batch_size": 4}, parallel=folded).to_yaml())
    capsys.readouterr()
    assert main([*words, "--no-search"]) == 0
    shown = capsys.readouterr().out
    assert "tp 2, pp 1, dp 2, ep 4 of whole experts" in shown
    assert "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1" in shown
