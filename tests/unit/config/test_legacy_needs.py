"""Old compression flags that act only together with another flag."""

from __future__ import annotations

import pytest

from megatron.base.option import field_options
from megatron.config.flags import parse_args
from megatron.config.translate.legacy import NEEDS, LegacyConfig

BASE = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --lr 0.001
    --vocab-size 100 --train-iters 100
"""

_STABLE = "--grad_comp --grad_comp_type stable-topk"
_CLASSIC = "--grad_comp --grad_comp_type topk"
NEEDED: dict[str, str] = {
    "save_json_path": "--save_json_log",
    "experiment_name": "--save_json_log",
    "comp_seed": "--mp_acti_comp",
    "use_error_feedback": "--inter_grad_comp",
    "density": _CLASSIC,
    "stable_topk_interval": _STABLE,
    "stable_topk_threshold": _CLASSIC,
    "stable_topk_warmup_method": _STABLE,
    "stable_topk_range": _STABLE,
    "stable_topk_density_warmup_steps": _CLASSIC,
    "selective_grad_comp": "--grad_comp",
    "selective_grad_comp_way": "--grad_comp --selective_grad_comp",
    "max_activation_cache_size": "--forward-compress-method delta",
    "warmup_epochs": "--backward-compress-method fixpoint",
    "dp_bits": "--dp-mode sharded_ps_compressed",
    "log_gradients_output_dir": "--log_gradients",
    "emb_use_error_feedback": "--emb_grad_comp",
    **{name: "--" + name.rpartition("_type")[0] for name in NEEDS if name.endswith("comp_type")},
    **{name: "--" + name.rpartition("_rank")[0] for name in NEEDS if name.endswith("comp_rank")},
    **{name: "--" + name.rpartition("_warm_up")[0] for name in NEEDS if name.endswith("comp_warm_up")},
    "inter_grad_comp_epilogue_only": "--inter_grad_comp",
    **{name: "--forward-compress-method fixpoint" for name in NEEDS if name.startswith(("forward_bits", "forward_s"))},
    **{name: "--backward-compress-method fixpoint" for name in NEEDS if name.startswith(("backward_",))},
    "forward_bits_act": "--forward-compress-method delta-lowbits",
}


VALUES = {
    "forward_scale_dims": "(0,1,2)", "backward_scale_dims": "(0,1,2)", "stable_topk_warmup_method": "Dense",
    "experiment_name": "x", "save_json_path": "x", "log_gradients_output_dir": "x",
}  # fmt: skip


def _value(name: str) -> list[str]:
    """Value of an old flag other than its default."""
    (field,) = (field for field in field_options("legacy", LegacyConfig) if field.name == name)
    if name in VALUES or name.endswith("comp_type"):
        return [VALUES.get(name, "PowerSGD")]
    if field.choices:
        return [next(choice for choice in field.choices if choice != field.default)]
    if field.is_switch:
        return []
    return ["0.25" if field.element is float else str((field.default or 1) + (-1 if field.option.maximum == 8 else 1))]


def _old_notes(words: list[str], name: str) -> list[str]:
    notes = parse_args([*BASE.split(), *words]).notes
    return [note for note in notes if note.startswith(f"--{name.replace('_', '-')}: no effect without ")]


@pytest.mark.parametrize("name", NEEDS)
def test_an_old_flag_without_the_flag_it_needs_is_noted(name: str) -> None:
    words = [f"--{name.replace('_', '-')}", *_value(name)]
    assert _old_notes(words, name) == [f"--{name.replace('_', '-')}: no effect without {NEEDS[name]}"]
    assert _old_notes([*words, *NEEDED[name].split()], name) == []


def test_all_old_flags_are_covered_here() -> None:
    alone = {
        "grad_comp", "inter_grad_comp", "inter_acti_comp", "emb_comm_opt", "emb_grad_comp", "mp_grad_comp",
        "mp_acti_comp", "forward_compress_method", "backward_compress_method", "dp_mode", "save_json_log",
        "collect_log_path",
    }  # fmt: skip
    fields = list(field_options("legacy", LegacyConfig))
    assert {field.name for field in fields if not field.option.no_effect} == alone | set(NEEDS)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (f"{_STABLE} --use_error_feedback", "use_error_feedback"),
        (f"{_STABLE} --grad_comp_rank 8", "grad_comp_rank"),
        (f"{_STABLE} --comp_seed 8", "comp_seed"),
        (f"{_STABLE} --stable_topk_density_warmup_steps 9", "stable_topk_density_warmup_steps"),
        (f"{_STABLE} --stable_topk_threshold 0 --stable_topk_warmup_method Dense", "stable_topk_warmup_method"),
        (f"{_CLASSIC} --grad_comp_warm_up 0.3", "grad_comp_warm_up"),
        (f"{_CLASSIC} --stable_topk_range 3", "stable_topk_range"),
        (f"{_CLASSIC} --stable_topk_interval 3", "stable_topk_interval"),
        ("--grad_comp --density 0.3", "density"),
        ("--grad_comp --selective_grad_comp_way 1", "selective_grad_comp_way"),
        ("--emb_grad_comp --emb_grad_comp_type stable-topk --emb_use_error_feedback", "emb_use_error_feedback"),
        ("--emb_grad_comp --emb_grad_comp_type stable-topk --emb_grad_comp_warm_up 0.2", "emb_grad_comp_warm_up"),
        ("--mp_grad_comp --use_error_feedback", "use_error_feedback"),
        ("--emb_grad_comp --use_error_feedback", "use_error_feedback"),
        ("--forward-compress-method fixpoint --forward-bits-act 2", "forward_bits_act"),
        ("--forward-compress-method fixpoint --max-activation-cache-size 9", "max_activation_cache_size"),
        ("--backward-compress-method fixpoint --forward-bits 2", "forward_bits"),
        ("--dp-mode allreduce --dp-bits 2", "dp_bits"),
        ("--dp-mode sharded_ps --warmup-epochs 2", "warmup_epochs"),
        ("--log-json-file j --experiment_name e", "experiment_name"),
    ],
)
def test_an_old_flag_of_another_type_is_noted(words: str, name: str) -> None:
    assert len(_old_notes(words.split(), name)) == 1
