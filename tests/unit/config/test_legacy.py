"""Every old compression flag becomes a spec with a note, and resolves."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.base.errors import UserError
from megatron.compression.schedule import RunLength
from megatron.config.flags import parse_args
from megatron.config.translate.legacy import LegacyConfig

CASES: dict[str, list[str]] = {
    "--grad_comp": ["dp-grad=powersgd,rank=4,seed=714,error-feedback=off,warmup=0.1"],
    "--grad_comp --grad_comp_type PowerSGD --grad_comp_rank 48 --grad_comp_warm_up 0.0 --use_error_feedback": [
        "dp-grad=powersgd,rank=48,seed=714,error-feedback=aggregate"
    ],
    "--grad_comp --collect-log-path logs": ["dp-grad=edgc,seed=714,error-feedback=off,warmup=0.1,warmup-ends=error"],
    "--grad_comp --collect-log-path logs --use_error_feedback --grad_comp_rank 32 --selective_grad_comp": [
        "dp-grad=edgc,rank=32,seed=714,error-feedback=aggregate,warmup=0.1,warmup-ends=error,stages=first:2"
    ],
    "--grad_comp --collect-log-path logs --grad_comp_type stable-topk": [
        "dp-grad=stable-topk,density=0.01,interval=100,range=50,warmup=200"
    ],
    "--collect-log-path logs": [],
    "--grad_comp --selective_grad_comp --comp_seed 3": [
        "dp-grad=powersgd,rank=4,seed=3,error-feedback=off,warmup=0.1,stages=first:2"
    ],
    "--grad_comp --selective_grad_comp --selective_grad_comp_way 3": [
        "dp-grad=powersgd,rank=4,seed=714,error-feedback=off,warmup=0.1,stages=first:3"
    ],
    "--grad_comp --grad_comp_type StableTopKReducerWithRangeBucketsEFCorrectionResIsGrad": [
        "dp-grad=stable-topk,density=0.01,interval=100,range=50,warmup=200"
    ],
    "--grad_comp --grad_comp_type stable-topk --density 0.4 --stable_topk_interval 200 --stable_topk_range 0 "
    "--stable_topk_threshold 0 --stable_topk_warmup_method Dense --move_grad_clip_to_reducer --use_new_adam_beta1 "
    "--use_new_adam_beta2 --stable_topk_num_buckets 1 --stable_topk_region_bucket_size 1": [
        "dp-grad=stable-topk,density=0.4,interval=200,range=0"
    ],
    "--grad_comp --grad_comp_type StableTopKReducerWithRangeBucketsEFCorrectionResIsGradPerLayer --density 0.9": [
        "dp-grad=stable-topk,density=0.9,interval=100,range=0,warmup=200"
    ],
    "--grad_comp --grad_comp_type TopKReducerEFCorrectionResIsGradWarmup --stable_topk_density_warmup_steps 1000": [
        "dp-grad=topk,density=1~0.01@1000,warmup=200"
    ],
    "--grad_comp --grad_comp_type topk --stable_topk_threshold 5": ["dp-grad=topk,density=1~0.01@20000,warmup=5"],
    "--inter_grad_comp": ["pp-backward=lowrank,rank=12,seed=714,error-feedback=off"],
    "--inter_grad_comp --inter_grad_comp_type PowerSGD --inter_grad_comp_rank 16 --inter_grad_comp_epilogue_only "
    "--use_error_feedback": ["pp-backward=lowrank,rank=16,seed=714,error-feedback=lazy,when=epilogue"],
    "--inter_grad_comp --inter_grad_comp_warm_up 0.2": [
        "pp-backward=lowrank,rank=12,seed=714,error-feedback=off,warmup=0.2"
    ],
    "--inter_acti_comp --inter_acti_comp_type PowerSGD --inter_acti_comp_rank 8 --inter_acti_comp_warm_up 0.1": [
        "pp-forward=lowrank,rank=8,seed=714,warmup=0.1"
    ],
    "--emb_comm_opt": ["embedding=fused"],
    "--emb_grad_comp --emb_grad_comp_type PowerSGD --emb_grad_comp_rank 8 --emb_grad_comp_warm_up 0": [
        "embedding=powersgd,rank=8,seed=714,error-feedback=off"
    ],
    "--emb_grad_comp --emb_use_error_feedback --emb_comm_opt": [
        "embedding=powersgd,rank=4,seed=714,error-feedback=local,warmup=0.1,fused=on"
    ],
    "--emb_grad_comp --emb_grad_comp_type EmbStableTopKReducerWithRangeBucketsEFCorrectionResIsGrad --density 0.2": [
        "embedding=stable-topk,density=0.2,interval=100,range=0,warmup=200"
    ],
    "--mp_grad_comp --mp_grad_comp_type PowerSGD --mp_grad_comp_rank 2 --mp_grad_comp_warm_up 0.3": [
        "tp-backward=powersgd,rank=2,seed=714,warmup=0.3"
    ],
    "--mp_acti_comp --mp_acti_comp_type PowerSGD --mp_acti_comp_rank 2 --mp_acti_comp_warm_up 0.3": [
        "tp-forward=powersgd,rank=2,seed=714,warmup=0.3"
    ],
    "--forward-compress-method fixpoint": ["pp-forward=fixpoint,bits=4,scale=channel,grid=asymmetric,warmup=1epochs"],
    "--forward-compress-method delta --max-activation-cache-size 100 --sample-order fixed": [
        "pp-forward=delta,bits=4,scale=channel,grid=asymmetric,cache=100,first-bits=32,cache-dtype=fp16"
    ],
    "--forward-compress-method delta --bf16 --sample-order fixed": [
        "pp-forward=delta,bits=4,scale=channel,grid=asymmetric,cache=20000,first-bits=32,cache-dtype=fp16"
    ],
    "--forward-compress-method delta-lowbits --forward-bits-act 2 --forward-bits 3 --warmup-epochs 2 "
    "--sample-order fixed": [
        "pp-forward=delta-lowbits,bits=3,scale=channel,grid=asymmetric,cache=20000,first-bits=32,cache-dtype=fp16,"
        "cache-bits=2,warmup=1epochs"
    ],
    "--forward-compress-method fixpoint --forward-bits 3 --forward-scale-method l2 --forward-scale-dims (0,1,2)": [
        "pp-forward=fixpoint,bits=3,scale=tensor,grid=asymmetric,scale-method=l2,warmup=1epochs"
    ],
    "--backward-compress-method fixpoint --backward-bits 6 --backward-scale-method max --backward-scale-dims (0,1) "
    "--warmup-epochs 0": ["pp-backward=fixpoint,bits=6,scale=channel,grid=asymmetric"],
    "--forward-compress-method none --backward-compress-method none": [],
    "--dp-mode sharded_ps_compressed": ["dp-grad=quantized-adam,bits=8,warmup=1epochs"],
    "--dp-mode sharded_ps_compressed --dp-bits 4 --warmup-epochs 2": ["dp-grad=quantized-adam,bits=4,warmup=2epochs"],
    "--dp-mode central_ps": ["dp-grad=parameter-server,server=central"],
    "--dp-mode sharded_ps": ["dp-grad=parameter-server,server=sharded"],
    "--dp-mode allreduce": [],
    "--experiment_name mine": [],
    "--save_json_log --save_json_path logs": [],
    "--log_gradients --log_gradients_output_dir logs": [],
    "--grad_comp --grad_comp_warm_up 1.0": ["dp-grad=powersgd,rank=4,seed=714,error-feedback=off,warmup=1.0"],
    "--grad_comp --grad_comp_warm_up 0.1234567": [
        "dp-grad=powersgd,rank=4,seed=714,error-feedback=off,warmup=0.1234567"
    ],
    "--grad_comp --grad_comp_type topk --density 0.1234567 --stable_topk_density_warmup_steps 0 "
    "--selective_grad_comp": ["dp-grad=topk,density=0.1234567,warmup=200,stages=first:2"],
    "--grad_comp --grad_comp_type stable-topk --selective_grad_comp --selective_grad_comp_way 1": [
        "dp-grad=stable-topk,density=0.01,interval=100,range=50,warmup=200,stages=first:1"
    ],
}


@pytest.mark.parametrize("flags", CASES)
def test_old_flags_become_specs_with_notes(by_iterations: list[str], flags: str) -> None:
    parsed = parse_args([*by_iterations, *flags.split()])
    assert parsed.config.compression.compress == CASES[flags]
    for spec in CASES[flags]:
        assert any(f"means --compress {spec}" in note for note in parsed.notes)
    config = parsed.resolve(1)
    assert {point.value for point in config.compression.specs(RunLength(100))} == {
        s.partition("=")[0] for s in CASES[flags]
    }


def test_every_old_flag_is_tested() -> None:
    tested = " ".join(CASES).replace("-", "_")
    assert [f.name for f in dataclasses.fields(LegacyConfig) if f"__{f.name}" not in tested] == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--grad_comp --grad_comp_type RandomizedSVD", ["--grad-comp-type RandomizedSVD", "use PowerSGD"]),
        ("--forward-compress-method fixpoint --forward-scale-dims (2,)", ["--forward-scale-dims", "(0,1)"]),
        (
            "--forward-compress-method delta --sample-order lazy",
            ["--sample-order lazy no sample comes twice", "--sample-order fixed"],
        ),
        ("--dp-mode sharded_ps_compressed --adam-beta1 0.95", ["beta=0.9", "write beta=0.95"]),
        ("--dp-mode sharded_ps_compressed --optimizer sgd", ["variant of Adam", "dp-grad=fixpoint"]),
        ("--compress pp-forward=delta,first-bits=12 --sample-order fixed", ["must be 1 to 8, 16 or 32"]),
        ("--compress pp-forward=delta,error-feedback=lazy --sample-order fixed", ["comes again; leave it out"]),
        ("--compress pp-forward=delta-lowbits,error-feedback=on --sample-order fixed", ["comes again; leave it out"]),
        ("--dp-mode sharded_ps_compressed --warmup-epochs 0", ["add warmup=N"]),
        ("--compress dp-grad=edgc,rank=8,min-rank=9", ["min-rank=9 is above rank=8"]),
        ("--compress dp-grad=edgc --deterministic-mode", ["dp-grad=edgc", "--deterministic-mode", "stage-slack=0"]),
        ("--compress dp-grad=quantized-adam", ["add warmup=N"]),
        ("--compress dp-grad=quantized-adam,warmup=9,stages=first:1", ["all stages must share"]),
        ("--compress dp-grad=quantized-adam,warmup=9,error-feedback=on", ["a residual of its own"]),
        ("--inter_grad_comp_rank 0", ["--inter-grad-comp-rank"]),
    ],
)
def test_invalid_old_flags_are_refused(by_iterations: list[str], flags: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_args([*by_iterations, *flags.split()]).resolve(1)
    assert all(word in str(caught.value) for word in words)


def test_old_flags_without_effect_are_noted(by_iterations: list[str]) -> None:
    parsed = parse_args([*by_iterations, "--grad_comp_rank", "8", "--selective_grad_comp"])
    assert "--grad-comp-rank: no effect without --grad-comp of type PowerSGD" in parsed.notes
    assert "--selective-grad-comp: no effect without --grad-comp" in parsed.notes


def test_save_json_log_sets_the_json_lines_file(by_iterations: list[str]) -> None:
    parsed = parse_args([*by_iterations, "--save_json_log", "--save_json_path", "logs/", "--experiment_name", "mine"])
    assert parsed.config.logging.log_json_file == "logs/mine.jsonl"
    assert "--save-json-log means --log-json-file logs/mine.jsonl" in parsed.notes
    parsed = parse_args([*by_iterations, "--save_json_log", "--experiment_name", "mine", "--log-json-file", "own"])
    assert parsed.config.logging.log_json_file == "own"
    assert "--save-json-log: no effect with --log-json-file own, where all records go" in parsed.notes


def test_collect_log_path_is_the_folder_of_edgc_records(by_iterations: list[str]) -> None:
    parsed = parse_args([*by_iterations, "--collect-log-path", "logs/"])
    assert parsed.resolve(1).logging.log_json_file == "logs/edgc.jsonl"
    assert "--collect-log-path means --log-json-file logs/edgc.jsonl" in parsed.notes


def test_log_gradients_output_dir_is_the_folder_of_gradient_records(by_iterations: list[str]) -> None:
    parsed = parse_args([*by_iterations, "--log_gradients", "--log_gradients_output_dir", "logs"])
    assert parsed.resolve(1).logging.log_json_file == "logs/gradients.jsonl"


@pytest.mark.parametrize(
    ("switch", "point"),
    [
        ("grad_comp", "dp-grad"),
        ("inter_grad_comp", "pp-backward"),
        ("inter_acti_comp", "pp-forward"),
        ("emb_grad_comp", "embedding"),
        ("mp_grad_comp", "tp-backward"),
        ("mp_acti_comp", "tp-forward"),
    ],
)
def test_a_warm_up_is_a_share_of_the_run(by_iterations: list[str], switch: str, point: str) -> None:
    """1.0 is the whole run, not a single iteration."""
    for share, iterations in (("1.0", 100), ("1", 100), ("0.999", 99), ("0.01", 1), ("0", 0)):
        config = parse_args([*by_iterations, f"--{switch}", f"--{switch}_warm_up", share]).resolve(1)
        specs = {key.value: spec for key, spec in config.compression.specs(RunLength(100)).items()}
        assert specs[point].activation.warmup_iters == iterations, share


@pytest.mark.parametrize("length", ["--train-samples=4000", "--train-tokens=128000"])
def test_a_warm_up_may_be_a_share_of_samples_or_tokens(minimal: list[str], length: str) -> None:
    """By default, as in Optimus-CC, a tenth of the run."""
    flags = [*minimal, length, "--global-batch-size", "8", "--grad_comp"]
    config = parse_args(flags).resolve(1)
    (spec,) = config.compression.specs(RunLength(config.training.planned_iters)).values()
    assert spec.activation.warmup_iters == 50


@pytest.mark.parametrize("switch", ["mp_grad_comp", "mp_acti_comp"])
def test_points_without_residuals_note_that_optimus_cc_had_them(by_iterations: list[str], switch: str) -> None:
    notes = parse_args([*by_iterations, f"--{switch}"]).notes
    feedback_notes = [note for note in notes if "without the error feedback of Optimus-CC" in note]
    assert len(feedback_notes) == 1
    assert feedback_notes[0].startswith(f"--{switch.replace('_', '-')}: ")


def test_delta_messages_fix_the_sample_order(by_iterations: list[str]) -> None:
    parsed = parse_args([*by_iterations, "--forward-compress-method", "delta"])
    assert parsed.resolve(1).data.sample_order == "fixed"
    assert any("means --sample-order fixed" in note for note in parsed.notes)


@pytest.mark.parametrize(
    ("flags", "ignored"),
    [
        ("--log-gradients --log-gradients-output-dir folder --save-json-log", "--log-gradients-output-dir"),
        ("--grad-comp --collect-log-path folder --save-json-log", "--collect-log-path"),
        (
            "--log-gradients --log-gradients-output-dir folder --grad-comp --collect-log-path records",
            "--log-gradients-output-dir",
        ),
    ],
)
def test_all_records_go_to_one_file(by_iterations: list[str], flags: str, ignored: str) -> None:
    parsed = parse_args([*by_iterations, *flags.split()])
    path = parsed.config.logging.log_json_file
    assert f"{ignored}: no effect with --log-json-file {path}, where all records go" in parsed.notes
