"""The scripts of other systems run unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.base.errors import UserError
from megatron.config.curriculum import lengths_of
from megatron.config.flags import ParsedRun, parse_args
from megatron.config.run import RunConfig
from tests.unit.config.original_scripts import AQSGD_DEBERTA, AQSGD_LM, COMPLETE, Script


def _read(script: Script, folder: Path, more_flags: str = "") -> ParsedRun:
    file = folder / "ds_config.json"
    file.write_text(script.deepspeed)
    words = f"{script.flags} {more_flags}".split()
    return parse_args([word.replace("DS", str(file)) if word.endswith("DS") else word for word in words])


def _resolved(script: Script, folder: Path, more_flags: str = "") -> tuple[RunConfig, list[str]]:
    run = _read(script, folder, more_flags)
    return run.resolve(script.world_size, cuda_available=True), run.notes


@pytest.mark.parametrize("name", COMPLETE)
def test_a_script_resolves_unchanged(name: str, tmp_path: Path) -> None:
    config, notes = _resolved(COMPLETE[name], tmp_path)
    assert config.tokenizer.tokenizer_type is not None
    compresses = any(switch in COMPLETE[name].flags for switch in ("--grad_comp", "--inter_grad_comp"))
    assert bool(config.compression.compress) == compresses
    guessed = "--tokenizer-type" not in COMPLETE[name].flags
    assert guessed == ("--vocab-file with --merge-file means --tokenizer-type GPT2BPETokenizer" in notes)


def test_a_lone_backslash_is_noted(tmp_path: Path) -> None:
    config, notes = _resolved(COMPLETE["optimus-cc tbl2 335M CB"], tmp_path)
    right, _ = _resolved(COMPLETE["optimus-cc tbl2 2.5B CB"], tmp_path)
    assert config.compression == right.compression
    assert [note for note in notes if "backslash" in note] == [
        "a lone backslash is ignored; at the end of a line, nothing may follow it, not even a space"
    ]


def test_schemes_of_optimus_cc_become_specs(tmp_path: Path) -> None:
    config, _ = _resolved(COMPLETE["optimus-cc tbl2 2.5B CB-FE-SC"], tmp_path)
    assert config.compression.compress == [
        "dp-grad=powersgd,rank=128,seed=714,error-feedback=aggregate,stages=first:3",
        "pp-backward=lowrank,rank=16,seed=714,error-feedback=lazy,when=epilogue",
        "embedding=fused",
    ]
    assert (config.recompute.recompute_granularity, config.recompute.recompute_method) == ("full", "uniform")


def test_sequence_parallelism_on_one_rank_is_noted(tmp_path: Path) -> None:
    config, notes = _resolved(COMPLETE["jupiter 13B TP_SIZE=1"], tmp_path)
    assert config.parallel.sequence_parallel is False
    assert "--sequence-parallel: no effect, there is one tensor-parallel rank" in notes
    config, notes = _resolved(COMPLETE["jupiter 13B"], tmp_path)
    assert config.parallel.sequence_parallel is True
    assert not any("--sequence-parallel" in note for note in notes)


def test_a_deepspeed_file_of_a_script_is_translated(tmp_path: Path) -> None:
    config, notes = _resolved(COMPLETE["megatron-deepspeed 125M flash"], tmp_path)
    assert config.parallel.use_distributed_optimizer is True
    assert config.precision.initial_loss_scale == 2048
    assert config.precision.loss_scale_window == 500
    file_notes = [note for note in notes if note.startswith("--deepspeed-config")]
    assert "used: train_batch_size" in file_notes[0]
    assert "no effect: steps_per_print" in file_notes[1]
    config, _ = _resolved(COMPLETE["megatron-deepspeed pretrain_llama2"], tmp_path)
    assert config.parallel.use_distributed_optimizer is False


def test_a_curriculum_of_a_script_is_translated(tmp_path: Path) -> None:
    config, notes = _resolved(COMPLETE["megatron-deepspeed 350M curriculum"], tmp_path)
    lengths = lengths_of(config.curriculum, config.model.seq_length)
    assert (lengths.lengths[0], lengths.full, lengths.first[-1] + 1) == (80, 2048, 110_000)
    assert any(note.startswith("--deepspeed-config") and "curriculum_learning" in note for note in notes)
    # The same tokens make more samples, since the first samples are short.
    plain, _ = _resolved(COMPLETE["megatron-deepspeed 350M dense"], tmp_path)
    assert plain.training.train_samples == 300_000_000_000 // 2048
    assert config.training.train_samples is not None
    assert plain.training.train_samples < config.training.train_samples < 439453125


def test_the_language_model_of_aq_sgd_resolves_with_a_length(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        _resolved(AQSGD_LM, tmp_path)
    assert str(caught.value) == (
        "not given but required: one of --train-iters, --train-samples and --train-tokens; add it"
    )
    config, notes = _resolved(AQSGD_LM, tmp_path, "--train-iters 1000 --data-path d")
    model, parallel, training = config.model, config.parallel, config.training
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (48, 1600, 25)
    assert (parallel.pipeline_model_parallel_size, parallel.pipeline_schedule) == (8, "gpipe")
    assert (training.micro_batch_size, training.global_batch_size) == (1, 32)
    assert (config.checkpoint.load, config.checkpoint.finetune) == ("checkpoints/gpt2-xl", True)
    assert config.data.sample_order == "fixed"
    assert config.tokenizer.tokenizer_model == "gpt2-xl"
    assert [spec.split(",")[:2] for spec in config.compression.compress] == [
        ["pp-forward=delta", "bits=4"],
        ["pp-backward=fixpoint", "bits=8"],
    ]
    assert any("--num-layers 6 counts one stage" in note for note in notes)
    assert any(note.startswith("--num-iters") for note in notes)


def test_a_classifier_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--task-name cola: only language models are trained"):
        _read(AQSGD_DEBERTA, tmp_path)
