"""Each program trains a single kind of model."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.base.errors import UserError
from megatron.config.flags import parse_program
from megatron.config.model import ModelConfig
from megatron.config.model_types import ModelType, check_model_type
from megatron.config.run import RunConfig

_BASE = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --lr 0.001
    --vocab-size 100 --train-iters 100
"""
BASE = _BASE.split()


NEEDED: dict[ModelType, list[str]] = {
    "gpt": [],
    "bert": [],
    "t5": [
        *("--decoder-seq-length", "8", "--vocab-extra-ids", "4"),
        *("--tokenizer-type", "BertWordPieceCase", "--vocab-file", "v"),
    ],
}


@pytest.mark.parametrize("kind", NEEDED)
def test_a_program_sets_the_kind(kind: ModelType) -> None:
    base = [*BASE, *NEEDED[kind]]
    parsed = parse_program(base, kind)
    model = parsed.resolve(1).model
    assert model.model_type == kind
    assert parsed.notes == []
    assert model.num_tokentypes == (2 if kind == "bert" else 0)
    again = parse_program([*base, "--model-type", kind.upper()], kind)
    assert again.resolve(1).model == model


def test_another_kind_is_refused_with_the_name_of_its_program(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--model-type bert: pretrain_gpt.py trains GPT; run pretrain_bert.py"):
        parse_program([*BASE, "--model-type", "bert"], "gpt")
    saved = tmp_path / "config.yaml"
    saved.write_text(parse_program(BASE, "gpt").resolve(1).to_yaml())
    with pytest.raises(UserError, match=r"pretrain_bert.py trains BERT; run pretrain_gpt.py"):
        parse_program(["--config", str(saved)], "bert")
    assert parse_program(["--config", str(saved)], "gpt").resolve(1).model.model_type == "gpt"


def test_a_configuration_without_a_kind_is_of_gpt() -> None:
    values = RunConfig(model=ModelConfig(num_layers=2)).to_dict()
    del values["model"]["model_type"]
    assert RunConfig.from_dict(values).model.model_type == "gpt"


def test_a_checkpoint_of_another_kind_is_refused() -> None:
    check_model_type("--load x", "bert", "bert")
    with pytest.raises(UserError, match=r"^--load x holds a model of type gpt, not bert; continue with"):
        check_model_type("--load x", "gpt", "bert")
    with pytest.raises(UserError, match=r"holds a model of type new, not gpt; continue with another version"):
        check_model_type("--load x", "new", "gpt")


def test_bert_without_its_binary_head_has_no_token_types() -> None:
    model = parse_program([*BASE, "--bert-no-binary-head"], "bert").resolve(1).model
    assert (model.bert_binary_head, model.num_tokentypes, model.loss_names) == (False, 0, ("lm loss",))
    model = parse_program([*BASE, "--bert-no-binary-head", "--num-tokentypes", "2"], "bert").resolve(1).model
    assert model.num_tokentypes == 2
