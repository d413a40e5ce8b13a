"""Impossible DeBERTa fine-tunings are refused in one line, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.config.run import RunConfig
from megatron.evaluation.command import main
from tests.support.tasks import task_flags, write_tsv, write_vocabulary
from tests.support.tiny import tiny_config

DEBERTA: dict[str, Any] = {"model_type": "deberta", "task_head": "classification", "task_classes": 2}


def _refused(folder: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    files = [write_tsv(folder / f"{name}.tsv", "RTE", 8) for name in ("train", "dev")]
    flags = task_flags(write_vocabulary(folder), "RTE", files[:1], files[1:], model_type="deberta", **changes)
    assert main(flags) == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_hugging_face_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "deberta-v2"}))
    error = _refused(tmp_path, capsys, pretrained_checkpoint=tmp_path / "hf")
    assert f"--pretrained-checkpoint {tmp_path / 'hf'} is a Hugging Face folder; name the folder that" in error
    assert "tools/ckpt_convert.py" in error


def test_a_tokenizer_without_its_model_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = _refused(tmp_path, capsys)
    assert "--tokenizer-type BertWordPieceLowerCase has no [CLS], [SEP], [PAD], which DeBERTa needs" in error
    (tmp_path / "spm.model").write_bytes(b"no model")
    tokenizer = {"tokenizer_type": "SentencePieceTokenizer", "vocab_file": None}
    error = _refused(tmp_path, capsys, tokenizer_model=tmp_path / "spm.model", **tokenizer)
    assert error.endswith(f"--tokenizer-model {tmp_path / 'spm.model'}: is not a SentencePiece model")


@pytest.mark.parametrize(
    ("model", "parallel", "message"),
    [
        ({"conv_kernel_size": 3}, {"sequence_parallel": True}, "--sequence-parallel: a convolution of"),
        ({"conv_kernel_size": 2}, {}, "--conv-kernel-size 2: has no center"),
        ({"position_buckets": 40}, {}, "--position-buckets 40: give 0, or at least 4"),
        ({"swiglu": True}, {}, "--swiglu: DeBERTa has"),
        ({"num_query_groups": 2}, {}, "--num-query-groups 2: DeBERTa has"),
        ({"num_tokentypes": 1}, {}, "--num-tokentypes 1: the two sentences"),
        ({}, {"virtual_pipeline_model_parallel_size": 2}, "--virtual-pipeline-model-parallel-size 2: each stage of"),
    ],
)
def test_unsupported_models_and_layouts_are_refused(
    model: dict[str, Any], parallel: dict[str, Any], message: str
) -> None:
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, **parallel}
    with pytest.raises(UserError) as refused:
        tiny_config({"model": {**DEBERTA, **model}, "parallel": layout}, 4)
    assert str(refused.value).startswith(message)


def _with(model: dict[str, Any], training: dict[str, Any]) -> RunConfig:
    return tiny_config({"model": {**DEBERTA, **model}, "training": training}, 1)


def test_compiling_its_layers_is_refused() -> None:
    with pytest.raises(UserError, match="--compile on: DeBERTa's layers are not compiled"):
        _with({}, {"compile": "on"})


def test_all_stages_or_no_stages_gather_compressed() -> None:
    layout = {"pipeline_model_parallel_size": 3, "use_distributed_optimizer": True}
    sections = {"model": {**DEBERTA, "num_layers": 3}, "parallel": layout, "training": {"global_batch_size": 4}}
    for stages, refused in (("all", False), ("first:1", True)):
        compression = {"compress": [f"param-gather=fixpoint,bits=8,stages={stages}"]}
        if not refused:
            tiny_config({**sections, "compression": compression}, 6)
            continue
        with pytest.raises(UserError, match="stages 0, 1, 2 hold the same embedding"):
            tiny_config({**sections, "compression": compression}, 6)
