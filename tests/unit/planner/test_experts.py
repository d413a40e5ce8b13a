"""Plans of models with experts: FLOPs, rows, imbalance, and the search."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.base.errors import UserError
from megatron.distributed.policy import CompressionPlan
from megatron.models.flops import model_flops_per_sample
from megatron.planner.choice import Choice, make_choice
from megatron.planner.cluster import LinkSpec
from megatron.planner.command import main
from megatron.planner.dry_run import DryBackend, DryExpertComm, ExpertLoad
from megatron.planner.expert_imbalance import parse_imbalance
from megatron.planner.growth import describe_growth
from megatron.planner.predict import Predictor
from megatron.planner.search import EXPERT_SETS, SPEC_SETS, add_expert_sets, enumerate_choices
from tests.unit.planner.support import CLUSTER, VOCAB, predictor_of, small_run, write_files

MOE: dict[str, Any] = {"num_experts": [8, 8, 16, 16], "expert_interval": 2, "moe_ffn_hidden_size": 128}


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["single", "grouped"])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (1, 4), (2, 2)])
def test_flops_match_the_formula(precision: dict[str, Any], tp: int, ep: int) -> None:
    shared = {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_gate": True, "swiglu": True}
    layout = {"tensor_model_parallel_size": tp, "expert_model_parallel_size": ep}
    config = small_run(model={**MOE, **shared}, parallel=layout, precision=precision)
    predictor, choice = predictor_of(config)
    total = 0.0
    for name, count in predictor.contents(choice, 0).items():
        piece = predictor.book.piece(choice, name)
        total += count * (piece.forward.flops + piece.backward.flops)
    again = config.model.num_layers * 2 * config.model.seq_length**2 * config.model.hidden_size
    tokens, layers = config.model.seq_length, len(config.model.expert_layers)
    # The weighted sum of a token's rows has products too: forward, and backward to the weights.
    weighing = layers * 2 * 2 * tokens * config.model.moe_router_topk * config.model.hidden_size
    # Each tensor-parallel rank has the full router and gate.
    small = sum(2 * 3 * tokens * config.model.hidden_size * (n + 1) for n in config.model.expert_layers.values())
    expected = model_flops_per_sample(config.model, 1024, causal=False) + again
    assert total * tp == pytest.approx(expected + tp * weighing + (tp - 1) * small, rel=2e-3)


@pytest.mark.parametrize("recomputed", [False, True])
def test_changes_by_several_compressors_inside_layers_add_up(recomputed: bool) -> None:
    """As in one dry run with all of them."""
    layout = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "sequence_parallel": recomputed}
    recompute = {"recompute_granularity": "full" if recomputed else None}
    specs = ("tp-forward=fixpoint", "tp-backward=fixpoint,bits=4,rotation=64", "experts=aggressive")
    config = small_run(specs=specs, model={**MOE, "num_experts": [8]}, parallel=layout, recompute=recompute)
    predictor, choice = predictor_of(config)
    for name in predictor.names:
        composed = predictor.book.piece(choice, name)
        direct = predictor.book._make_pieces(choice, predictor.book.specs(choice)).piece(name)
        exact = predictor.book.piece(dataclasses.replace(choice, specs=()), name)
        assert composed.forward.coding_s + composed.backward.coding_s > exact.forward.coding_s + exact.backward.coding_s
        for way in ("forward", "backward", "weight"):
            total, expected = getattr(composed, way), getattr(direct, way)
            assert Counter(total.collectives) == Counter(expected.collectives)
            for values in ("sent", "inside"):
                nonzero = {point: count for point, count in getattr(total, values).items() if count}
                assert nonzero == {point: count for point, count in getattr(expected, values).items() if count}
            for value in ("seconds", "coding_s", "flops"):
                assert getattr(total, value) == pytest.approx(getattr(expected, value), rel=1e-9)
        for value in ("recorded_bytes", "saved_bytes", "working_bytes", "parameters"):
            assert getattr(composed, value) == getattr(direct, value)


def _comm(expert_load: ExpertLoad, size: int = 4) -> DryExpertComm:
    backend = DryBackend(CLUSTER.device)
    comm = backend.experts(size, backend.recorder(), CompressionPlan({}), expert_load, folded=False)
    assert isinstance(comm, DryExpertComm)
    return comm


def test_imbalance_fills_the_first_expert() -> None:
    comm = _comm(ExpertLoad(2.5))
    counts = comm.count_rows(torch.empty(100, 2, device="meta"), 8)
    assert counts.tolist() == [62, 20, 20, 20, 20, 20, 19, 19]
    assert comm.count_rows(torch.empty(200, device="meta"), 8, 20).tolist() == [20, 20, 20, 20, 20, 20, 19, 19]
    received_re = comm.ranks.exchange_counts(counts.view(4, 2))
    assert received_re.tolist() == [[62, 20]] * 4


def _expected_rows(tokens: int, k: int, experts: int, nodes: int, full: float, capacity: float) -> list[float]:
    """Mean rows of each node, over all choices of k experts; tokens choose the first expert with probability ``full``
    and it accepts the share ``capacity`` of them."""
    ways = list(itertools.combinations(range(experts), k))
    with_first = [way for way in ways if 0 in way]
    rows = [0.0] * nodes
    for way in ways:
        chance = full / len(with_first) if 0 in way else (1 - full) / (len(ways) - len(with_first))
        cases = [(chance * capacity, way), (chance * (1 - capacity), tuple(e for e in way if e))]
        for probability, way_taken in cases if 0 in way else [(chance, way)]:
            for node in {e // (experts // nodes) for e in way_taken}:
                rows[node] += tokens * probability
    return rows


@pytest.mark.parametrize(("imbalance", "k", "nodes"), [(1.0, 2, 2), (1.0, 3, 4), (2.5, 2, 4), (2.0, 4, 2), (1.0, 8, 2)])
def test_rows_of_nodes_match_a_sum_over_all_choices(imbalance: float, k: int, nodes: int) -> None:
    """A token with several experts on a node is a single row there."""
    tokens, experts = 10_000, 8
    comm = _comm(ExpertLoad(imbalance, nodes), 8)
    chosen = torch.empty(tokens, k, device="meta")
    full = imbalance * k / experts
    for most in (None, round(0.75 * full * tokens)):
        rows_n, choices_n = comm.count_by_node(chosen, chosen, experts, most)
        capacity = 1.0 if most is None else most / (full * tokens)
        if imbalance > 1 or most is None:  # otherwise all experts are full
            expected = _expected_rows(tokens, k, experts, nodes, full, capacity)
            assert rows_n.tolist() == pytest.approx(expected, abs=1.0)
        counts = comm.count_rows(chosen, experts, most)
        assert choices_n.tolist() == counts.view(nodes, -1).sum(1).tolist()
        assert (rows_n <= choices_n).all()
        # Rows that the first node receives, if there are as many ranks as nodes.
        local, local_most = experts // nodes, None if most is None else nodes * most
        received = comm.count_rows(torch.empty(0, device="meta"), local, local_most, nodes * int(choices_n[0]))
        assert received.tolist() == pytest.approx([nodes * count for count in counts[:local].tolist()], abs=2 * nodes)


def test_imbalance_costs_time_and_memory_but_no_bytes() -> None:
    parallel = {"expert_model_parallel_size": 8, "moe_two_stage": "off"}
    wide = {**MOE, "num_experts": [8], "moe_ffn_hidden_size": 4096, "seq_length": 512}
    config = small_run(model=wide, parallel=parallel)
    predictor, choice = predictor_of(config)
    even, uneven = predictor.predict(choice), Predictor(config, CLUSTER, VOCAB, 3.0).predict(choice)
    assert even.sent == uneven.sent
    assert uneven.parts["compute"] > 1.5 * even.parts["compute"]
    assert uneven.parts["expert parallel"] > 1.5 * even.parts["expert parallel"]
    assert uneven.memory["activations"] > 1.5 * even.memory["activations"]
    assert uneven.mfu < even.mfu


def test_growing_sequences_keep_the_imbalance() -> None:
    wide = {**MOE, "num_experts": [8], "moe_ffn_hidden_size": 4096, "seq_length": 512}
    curriculum = {"curriculum_learning": True, "curriculum_seqlen_min": 256, "curriculum_seqlen_steps": 50}
    config = small_run(model=wide, parallel={"expert_model_parallel_size": 8}, curriculum=curriculum)
    predictor, choice = Predictor(config, CLUSTER, VOCAB, 3.0), make_choice(config, CLUSTER.gpus)
    balanced = Predictor(config, CLUSTER, VOCAB)
    balanced_s, full_s = (f"{each.predict(choice).seconds:.3g}" for each in (balanced, predictor))
    assert balanced_s != full_s
    assert f" {full_s} s in the end" in describe_growth(predictor, choice)


LEGS = ("ep-dispatch-forward", "ep-dispatch-backward", "ep-combine-forward", "ep-combine-backward")


def test_dispatch_and_combine_cost_the_bytes_of_their_rows() -> None:
    parallel = {"expert_model_parallel_size": 4}
    exact, choice = predictor_of(small_run(model=MOE, parallel=parallel))
    coded, chosen = predictor_of(
        small_run(model=MOE, parallel=parallel, specs=("ep-dispatch=fixpoint,bits=8,group=64",))
    )
    plain, small = exact.predict(choice), coded.predict(chosen)
    micro_batches, rows, h = 4, 32 * 2 * 3 // 4, 64
    for leg in LEGS:
        assert plain.sent[leg] == 4 * micro_batches * rows * h * 4
        assert small.sent[leg] == (4 * micro_batches * rows * (h + 4) if "dispatch" in leg else plain.sent[leg])
    assert plain.across == {point: nbytes for point, nbytes in plain.across.items() if point == "dp-grad"}
    assert small.parts["coding"] > plain.parts["coding"]
    assert small.parts["expert parallel"] < plain.parts["expert parallel"]
    one_stage = {"expert_model_parallel_size": 8, "moe_two_stage": "off"}
    eight, split = predictor_of(small_run(model=MOE, parallel=one_stage))
    prediction = eight.predict(split)
    for leg in LEGS:
        assert prediction.across[leg] == pytest.approx(prediction.sent[leg] * 4 / 7)


def test_two_stages_send_a_row_once_to_each_node() -> None:
    """Only rows between nodes are compressed. With a rank per node, all modes send the same."""
    model = {**MOE, "num_experts": [8], "expert_interval": 1, "moe_router_topk": 4}
    specs = ("ep-dispatch=fixpoint,bits=8,group=64", "ep-combine=fixpoint,bits=8,group=64")
    eight = {"expert_model_parallel_size": 8}
    plain, choice = predictor_of(small_run(model=model, parallel=eight))
    coded, chosen = predictor_of(small_run(model=model, parallel=eight, specs=specs))
    once, single = predictor_of(small_run(model=model, parallel={**eight, "moe_two_stage": "off"}))
    tokens, layers, micro_batches, h = 32, 8, 4, 64
    across = round(tokens * (1 - comb(4, 4) / comb(8, 4)))
    inside = tokens * 4 * 3 // 4
    for leg in LEGS:
        assert plain.predict(choice).across[leg] == layers * micro_batches * across * h * 4
        assert plain.predict(choice).sent[leg] == layers * micro_batches * (across + inside) * h * 4
        assert coded.predict(chosen).sent[leg] == layers * micro_batches * (across * (h + 4) + inside * h * 4)
    # Two hops of all-to-alls: of counts, of choices with their weights' gradients, and of rows four times.
    waits = 7 * 1 * 20e-6 + 5 * 3 * 5e-6
    between = (4 * across * h * 4 + 8 + (8 + 4) * tokens * 4 // 2) / (40e9 / 8 / 4)
    hop = (4 * inside * h * 4 + 3 * 4) / (400e9 / 8)
    seconds = layers * micro_batches * (waits + between + hop)
    assert plain.predict(choice).parts["expert parallel"] == pytest.approx(seconds, rel=1e-9)
    assert seconds < once.predict(single).parts["expert parallel"]
    single_ranks = dataclasses.replace(CLUSTER, gpus_per_node=1)
    for mode in ("auto", "on", "off"):
        run = small_run(model=model, parallel={**eight, "moe_two_stage": mode})
        predictor, single = predictor_of(run, single_ranks)
        prediction = predictor.predict(single)
        assert prediction.sent[LEGS[0]] == layers * micro_batches * (tokens * 4 * 7 // 8) * h * 4, mode


def test_experts_without_tensor_parallelism_are_planned() -> None:
    """Tensor-parallel ranks send their own tokens, hold full experts, and reduce these among fewer replicas."""
    sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 4}
    folded, choice = predictor_of(small_run(model=MOE, parallel={**sizes, "expert_tensor_parallel_size": 1}))
    assert choice.folded
    assert (choice.expert_ranks, choice.expert_dp) == (4, 2)
    split = dataclasses.replace(choice, ep=2, folded=False)
    assert (split.expert_ranks, split.expert_dp) == (4, 2)
    full_experts, split_experts = folded.predict(choice), folded.predict(split)
    assert [replicas for _, replicas in folded.count_replicas(choice, 0)] == [4, 2]
    assert folded.count_replicas(choice, 0)[1][0] == (2 * 8 + 2 * 16) // 4 * (2 * 64 * 128 + 128 + 64)
    rows = 32 * 2 // 2 * 3 // 4
    assert full_experts.sent["ep-dispatch-forward"] == 4 * choice.micro_batches * rows * 64 * 4
    assert split_experts.sent["ep-dispatch-forward"] == 4 * choice.micro_batches * (32 * 2 // 2) * 64 * 4
    assert full_experts.sent["tp-forward"] < split_experts.sent["tp-forward"]  # no gather before experts


def test_experts_are_reduced_over_their_replicas() -> None:
    predictor, choice = predictor_of(small_run(model=MOE, parallel={"expert_model_parallel_size": 8}))
    experts = sum(count for count, replicas in predictor.count_replicas(choice, 0) if replicas == 1)
    shared = predictor.elements(choice, 0) - experts
    assert experts == (2 * 8 + 2 * 16) // 8 * (2 * 64 * 128 + 128 + 64)
    ring = 2 * 7 / 8 * 4
    for ep, nbytes in ((8, ring * shared), (4, ring * shared + 8 * experts), (1, ring * (shared + 8 * experts))):
        sent = predictor.predict(dataclasses.replace(choice, ep=ep)).sent["dp-grad"]
        assert sent == pytest.approx(nbytes, rel=1e-3)  # padding comes on top
    memory = predictor.predict(choice).memory
    assert memory["optimizer"] == 8 * (shared + experts)
    sharded = predictor.predict(dataclasses.replace(choice, sharded=True)).memory
    assert sharded["optimizer"] == 8 * (shared / 8 + experts)


def test_muon_divides_matrices_among_their_replicas() -> None:
    """Experts have fewer replicas: their moments, their work, and the bytes of the exchange."""
    parallel = {"expert_model_parallel_size": 8}
    predictor, choice = predictor_of(small_run(model=MOE, parallel=parallel, optimizer={"optimizer": "muon"}))
    adam, _ = predictor_of(small_run(model=MOE, parallel=parallel))

    def matrices(**changes: Any) -> float:
        """Numbers in the matrices that a device updates: 4 bytes fewer than Adam's two moments each."""
        changed = dataclasses.replace(choice, **changes)
        return (adam.predict(changed).memory["optimizer"] - predictor.predict(changed).memory["optimizer"]) / 4

    experts = (2 * 8 + 2 * 16) // 8 * 2 * 64 * 128
    shared = matrices() - experts
    assert matrices(ep=1) == shared + 8 * experts
    assert matrices(sharded=True) == shared / 8 + experts
    assert matrices(sharded=True, ep=2) == shared / 8 + experts
    assert matrices(sharded=True, ep=1) == (shared + 8 * experts) / 8
    flops = {}
    for ep in (8, 4, 1):
        sharded = dataclasses.replace(choice, sharded=True, ep=ep)
        # Each matrix goes to its owner and back, except the owner's shard: tests of training check the bytes.
        assert 0 < predictor.predict(sharded).sent["optimizer"] < 2 * 4 * matrices(sharded=True, ep=ep)
        flops[ep] = sum(update.flops for update in predictor.matrices(sharded, 0))
    # The number of experts is the same; the busiest device has a few matrices more or less.
    assert flops[8] == pytest.approx(flops[1], rel=0.1)


def test_expert_parallel_sizes_are_searched() -> None:
    config = small_run(model=MOE)
    tried = list(enumerate_choices(config, CLUSTER, add_expert_sets(config.model, SPEC_SETS)))
    assert {choice.ep for choice in tried} == {1, 2, 4, 8}
    assert all(choice.tp * choice.dp % choice.expert_ranks == 0 for choice in tried)
    folded = {(choice.tp, choice.ep) for choice in tried if choice.folded}
    assert folded == {(2, 2), (2, 4), (2, 8), (4, 4), (4, 8)}
    specs = {(choice.ep > 1, tuple(spec for spec in choice.specs if spec.startswith("ep-"))) for choice in tried}
    assert specs == {(False, ()), (True, ()), *((True, spec_set) for spec_set in EXPERT_SETS)}
    dense_sets = add_expert_sets(small_run().model, SPEC_SETS)
    assert not any(spec.startswith("ep-") for spec_set in dense_sets for spec in spec_set)


def test_compressed_rows_are_faster_on_slow_links_alone() -> None:
    """Expert parallelism also saves memory."""
    model = {"num_layers": 2, "num_experts": [8], "moe_ffn_hidden_size": 4096}
    config = small_run(model=model, parallel={"expert_model_parallel_size": 8}, precision={"bf16": True})
    plain, replicated = (Choice(1, 1, 8, ep=ep, micro_batch=4) for ep in (8, 1))
    coded = dataclasses.replace(plain, specs=EXPERT_SETS[1])
    for rate, pays in ((1000.0, False), (0.05, True)):
        cluster = dataclasses.replace(CLUSTER, across=LinkSpec(rate, 20.0), gpus_per_node=1)
        predictor = Predictor(config, cluster, VOCAB)
        assert (predictor.predict(coded).seconds < predictor.predict(plain).seconds) is pays
        assert predictor.predict(plain).memory_bytes < predictor.predict(replicated).memory_bytes / 4


def _log(folder: Path, *lines: str) -> str:
    (folder / "log.jsonl").write_text("\n".join(lines))
    return str(folder / "log.jsonl")


def test_the_imbalance_is_a_number_or_from_a_log(tmp_path: Path) -> None:
    model = small_run(model=MOE).model
    assert parse_imbalance("1.5", model) == 1.5
    lines = [json.dumps({"kind": "train", "expert_imbalance": value}) for value in (3.0, 1.75)]
    assert parse_imbalance(_log(tmp_path, *lines, '{"kind": "end"}', '{"kind": "tr'), model) == 1.75
    for text, message in (
        ("0.5", "between 1 and 4"),
        ("4.5", "between 1 and 4"),
        ("nan", "--expert-imbalance"),
        ("much", "not a file"),
        (_log(tmp_path, "{}"), "no line has expert_imbalance"),
    ):
        with pytest.raises(UserError, match=message):
            parse_imbalance(text, model)
    with pytest.raises(UserError, match="no layer has experts"):
        parse_imbalance("2", small_run().model)


@pytest.mark.slow
def test_the_command_plans_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(**parallel: int) -> list[str]:
        model = {"num_layers": 2, "num_experts": [4], "moe_ffn_hidden_size": 128}
        run = small_run(4, model=model, training={"global_batch_size": 4}, parallel=parallel)
        return [*write_files(tmp_path, run, dataclasses.replace(CLUSTER, gpus=4)), "--expert-imbalance", "1.5"]

    words, best = write(expert_model_parallel_size=4), tmp_path / "best.yaml"
    assert main([*words, "--specs", "", "--top", "1", "--write", str(best)]) == 0
    output = capsys.readouterr().out
    assert "tp 1, pp 1, dp 4, ep 4" in output
    assert "ep-dispatch-forward: " in output
    assert main(["--config", str(best), *words[2:4], "--no-search"]) == 0
    words = write(tensor_model_parallel_size=2, expert_tensor_parallel_size=1, expert_model_parallel_size=4)
    capsys.readouterr()
    assert main([*words, "--no-search"]) == 0
    output = capsys.readouterr().out
    assert "tp 2, pp 1, dp 2, ep 4 of whole experts" in output
    assert "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1" in output
