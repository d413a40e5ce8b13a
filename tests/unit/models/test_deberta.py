"""DeBERTa against Hugging Face's: outputs, gradients, relative positions, and conversion in both directions."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.checkpoint.load import load_tensors
from megatron.checkpoint.model_state import model_tensors
from megatron.convert.names import rules
from megatron.convert.ours import read_ours
from megatron.models.context import ForwardContext
from megatron.models.deberta import DebertaStage
from megatron.models.disentangled import relative_rows
from megatron.models.losses import Targets
from tests.support.tiny import VOCAB, tiny_config, tiny_engines, tiny_pairs
from tests.unit.convert.support import change_json, convert, load_theirs, randomize, refusal

TOLERANCE = 1e-5
LENGTH = 16
FORMS: dict[str, dict[str, Any]] = {
    "v3": {"position_buckets": 6, "max_position_embeddings": 32},
    "v2-xlarge": {"position_buckets": 8, "conv_kernel_size": 3, "conv_act": "gelu", "layer_norm_eps": 1e-5},
    "positions and types": {
        "max_relative_positions": 5, "position_biased_input": True, "type_vocab_size": 2, "num_labels": 3,
        "hidden_act": "gelu_new",
    },
    "a number": {"position_buckets": 6, "num_labels": 1},
}  # fmt: skip


def their_folder(folder: Path, **form: Any) -> Any:
    """Saves a random model without dropout, and returns it."""
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": LENGTH, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0,
        "initializer_range": 0.1,
    }  # fmt: skip
    theirs = DebertaV2ForSequenceClassification(DebertaV2Config(**{**sizes, **form}))
    randomize(theirs)
    theirs.save_pretrained(folder)
    return theirs


def our_stage(folder: Path, **model: Any) -> DebertaStage:
    """Loads the model of a checkpoint, with a padded vocabulary."""
    weights = read_ours(folder)
    fields = {name: getattr(weights.model, name) for name in vars(weights.model)}
    stage = tiny_engines({"model": {**fields, "make_vocab_size_divisible_by": 64, **model}}).stages[0]
    assert isinstance(stage, DebertaStage)
    load_tensors(folder, weights.iteration, model_tensors([stage]), None)
    return stage


def _pairs() -> dict[str, Tensor]:
    tensors = tiny_pairs(range(4), LENGTH)
    assert (tensors["segment_ids_bs"] == 0).sum(dim=1).unique().numel() > 1, "all samples have the same length"
    return tensors


def _outputs(ours: DebertaStage, tensors: Mapping[str, Tensor], labels_b: Tensor) -> tuple[Tensor, Tensor]:
    types_bs = tensors["types_bs"] if ours.config.num_tokentypes else None
    context = ForwardContext(segment_ids_bs=tensors["segment_ids_bs"], types_bs=types_bs)
    targets = Targets(labels_b.unsqueeze(1), torch.ones(len(labels_b), 1))
    loss = ours.loss(ours(tensors["tokens_bs"], context), targets)
    assert loss.outputs_bc is not None
    return loss.outputs_bc, loss.objective


def _assert_close(name: str, actual: Tensor, expected: Tensor) -> None:
    # The bias of the keys has no effect: its gradient is rounding.
    scale = expected.abs().max().clamp(min=1e-3)
    assert (actual - expected).abs().max() / scale < TOLERANCE, name


@pytest.mark.parametrize("form", FORMS)
def test_outputs_and_gradients_match_hugging_face(form: str, tmp_path: Path) -> None:
    theirs, tensors = their_folder(tmp_path / "hf", **FORMS[form]), _pairs()
    convert(tmp_path / "hf", tmp_path / "ours", "megatron-cc")
    ours = our_stage(tmp_path / "ours")
    labels_b = torch.tensor([0.5, 1.0, -2.0, 0.0]).double() if form == "a number" else torch.tensor([0, 1, 1, 0])
    text_bs = (tensors["segment_ids_bs"] == 0).long()
    logits = theirs(tensors["tokens_bs"], attention_mask=text_bs, token_type_ids=tensors["types_bs"]).logits
    loss = F.mse_loss(logits[:, 0], labels_b.float()) if form == "a number" else F.cross_entropy(logits, labels_b)
    loss.backward()
    outputs_bc, objective = _outputs(ours, tensors, labels_b)
    objective.backward()
    _assert_close("outputs", outputs_bc, logits.detach())
    params, named = dict(ours.named_parameters()), dict(theirs.named_parameters())
    all_rules = list(rules(ours.config, VOCAB))
    assert {rule.ours for rule in all_rules} == set(params)
    assert {name for rule in all_rules for name, _ in rule.theirs} == set(named)
    for rule in all_rules:
        gradient = params[rule.ours].grad
        assert gradient is not None
        _assert_close(rule.ours, gradient[: rule.shape[0]], rule.join([named[name].grad for name, _ in rule.theirs]))


def test_relative_positions_match_hugging_face() -> None:
    from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

    for length, buckets, most in ((700, 256, 512), (40, 6, 32), (40, 0, 9)):
        shape = {"model_type": "deberta", "position_buckets": buckets, "max_relative_positions": most}
        config = tiny_config({"model": shape}, 1).model
        x = torch.empty(1, length, 1)
        span = buckets or most
        expected = (build_relative_position(x, x, buckets or -1, most)[0] + span).clamp(0, 2 * span - 1)
        assert torch.equal(relative_rows(length, config, x.device), expected)


def test_a_checkpoint_converts_back_and_ignores_padding(tmp_path: Path) -> None:
    theirs, tensors = their_folder(tmp_path / "hf", **FORMS["v2-xlarge"]), _pairs()
    convert(tmp_path / "hf", tmp_path / "ours", "megatron-cc")
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    back = load_theirs("DebertaV2ForSequenceClassification", tmp_path / "back")
    assert torch.equal(back(tensors["tokens_bs"]).logits, theirs.eval()(tensors["tokens_bs"]).logits)
    ours, labels_b = our_stage(tmp_path / "ours"), torch.zeros(4, dtype=torch.int64)
    repadded = {**tensors, "tokens_bs": torch.where(tensors["segment_ids_bs"] == 0, tensors["tokens_bs"], 7)}
    assert not torch.equal(repadded["tokens_bs"], tensors["tokens_bs"])
    assert torch.equal(_outputs(ours, tensors, labels_b)[0], _outputs(ours, repadded, labels_b)[0])


@pytest.fixture(scope="module")
def v3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v3") / "hf"
    their_folder(folder, **FORMS["v3"])
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"share_att_key": False}, "share_att_key False cannot be converted"),
        ({"norm_rel_ebd": "none"}, "norm_rel_ebd 'none' cannot be converted"),
        ({"pos_att_type": "c2p"}, "pos_att_type 'c2p' cannot be converted"),
        ({"embedding_size": 16}, "embedding_size 16 is not hidden_size 32"),
        ({"conv_kernel_size": 3}, "conv_act 'tanh' cannot be converted"),
        ({"id2label": dict.fromkeys("01234", "x")}, "classifier.weight has shape (2, 32)"),
        ({"model_type": "deberta"}, "model_type 'deberta' cannot be converted"),
        ({"num_hidden_layers": 2}, "has no place in the model"),
    ],
)
def test_other_models_are_refused_in_one_line(
    change: dict[str, Any], message: str, v3_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(v3_folder, tmp_path / "hf"))
    change_json(folder / "config.json", change)
    assert message in refusal(capsys, folder, tmp_path / "ours", "megatron-cc")
