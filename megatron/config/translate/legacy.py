"""Translation of the compression flags of Optimus-CC, Radius, EDGC and AQ-SGD into compressor specs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.base.errors import UserError
from megatron.base.option import derived, option
from megatron.base.user_text import Note, flag_of
from megatron.config.translate.rules import Dialect, ExplicitValues, SectionValues


@dataclass(frozen=True, kw_only=True)
class LegacyConfig:
    """Flags of Optimus-CC, Radius, EDGC and AQ-SGD for compression and logging, translated into our own."""

    experiment_name: str | None = derived("run", "Name of the run, for --save-json-log.")
    save_json_log: bool = option(False, "Same as --log-json-file PATH/NAME.jsonl.")
    save_json_path: str = option("./", "Folder of --save-json-log.", metavar="FOLDER")
    comp_seed: int = option(714, "Seed of compressors.", minimum=0)
    use_error_feedback: bool = option(False, "Error feedback for --grad-comp and --inter-grad-comp.")

    grad_comp: bool = option(False, "Same as --compress dp-grad=powersgd.")
    grad_comp_type: str = option("PowerSGD", "Compressor of --grad-comp.")
    grad_comp_rank: int = option(4, "Rank of --grad-comp.", minimum=1)
    grad_comp_warm_up: float = option(
        0.1, "Share of the iterations that --grad-comp leaves uncompressed.", minimum=0, maximum=1
    )
    collect_log_path: str | None = derived(
        "no records of EDGC",
        "EDGC's, the same as --log-json-file FOLDER/edgc.jsonl. With it --grad-comp means --compress dp-grad=edgc.",
        metavar="FOLDER",
    )
    selective_grad_comp: bool = option(False, "Only the first stages run --grad-comp.")
    selective_grad_comp_way: int = option(2, "How many stages --selective-grad-comp means.", minimum=0)

    density: float = option(0.01, "Share that a Top-K --grad-comp-type sends.", minimum=0, maximum=1)
    stable_topk_interval: int = option(100, "Steps between dense ones.", minimum=1)
    stable_topk_threshold: int = option(200, "Iterations that a Top-K --grad-comp-type leaves dense.", minimum=0)
    stable_topk_warmup_method: Literal["Dense"] = option("Dense", "Kind of warm-up during --stable-topk-threshold.")
    stable_topk_range: int = option(50, "Neighbors of a chosen coordinate that are sent as well.", minimum=0)
    stable_topk_density_warmup_steps: int = option(
        20000, "Steps over which the density of the classic Top-K falls.", minimum=0
    )
    stable_topk_num_buckets: int = option(1, "Unused.", no_effect="it had none in Radius either")
    stable_topk_region_bucket_size: int = option(1, "Unused.", no_effect="it had none in Radius either")
    move_grad_clip_to_reducer: bool = option(
        False, "Clip after the reduction.", no_effect="gradients are always clipped after the reduction"
    )
    use_new_adam_beta1: bool = option(False, "The flag's beta wins.", no_effect="the flag's beta always wins")
    use_new_adam_beta2: bool = option(False, "The flag's beta wins.", no_effect="the flag's beta always wins")

    inter_grad_comp: bool = option(False, "Same as --compress pp-backward=lowrank.")
    inter_grad_comp_type: str = option("PowerSGD", "Compressor of --inter-grad-comp.")
    inter_grad_comp_rank: int = option(12, "Rank of --inter-grad-comp.", minimum=1)
    inter_grad_comp_warm_up: float = option(
        0.0, "Share of the iterations that --inter-grad-comp leaves uncompressed.", minimum=0, maximum=1
    )
    inter_grad_comp_epilogue_only: bool = option(False, "--inter-grad-comp in the pipeline's epilogue only.")

    inter_acti_comp: bool = option(False, "Same as --compress pp-forward=lowrank.")
    inter_acti_comp_type: str = option("PowerSGD", "Compressor of --inter-acti-comp.")
    inter_acti_comp_rank: int = option(12, "Rank of --inter-acti-comp.", minimum=1)
    inter_acti_comp_warm_up: float = option(
        0.0, "Share of the iterations that --inter-acti-comp leaves uncompressed.", minimum=0, maximum=1
    )

    emb_comm_opt: bool = option(False, "Same as --compress embedding=fused.")
    emb_grad_comp: bool = option(False, "Same as --compress embedding=powersgd.")
    emb_grad_comp_type: str = option("PowerSGD", "Compressor of --emb-grad-comp.")
    emb_grad_comp_rank: int = option(4, "Rank of --emb-grad-comp.", minimum=1)
    emb_grad_comp_warm_up: float = option(
        0.1, "Share of the iterations that --emb-grad-comp leaves uncompressed.", minimum=0, maximum=1
    )
    emb_use_error_feedback: bool = option(False, "Error feedback for --emb-grad-comp.")

    mp_grad_comp: bool = option(False, "Same as --compress tp-backward=powersgd.")
    mp_grad_comp_type: str = option("PowerSGD", "Compressor of --mp-grad-comp.")
    mp_grad_comp_rank: int = option(4, "Rank of --mp-grad-comp.", minimum=1)
    mp_grad_comp_warm_up: float = option(
        0.1, "Share of the iterations that --mp-grad-comp leaves uncompressed.", minimum=0, maximum=1
    )
    mp_acti_comp: bool = option(False, "Same as --compress tp-forward=powersgd.")
    mp_acti_comp_type: str = option("PowerSGD", "Compressor of --mp-acti-comp.")
    mp_acti_comp_rank: int = option(4, "Rank of --mp-acti-comp.", minimum=1)
    mp_acti_comp_warm_up: float = option(
        0.1, "Share of the iterations that --mp-acti-comp leaves uncompressed.", minimum=0, maximum=1
    )

    forward_compress_method: Literal["none", "fixpoint", "delta", "delta-lowbits"] = option(
        "none", "Same as --compress pp-forward=METHOD."
    )
    forward_bits_act: int = option(
        4, "Bits of what --forward-compress-method delta-lowbits keeps.", minimum=1, maximum=8
    )
    max_activation_cache_size: int = option(20000, "Samples that --forward-compress-method delta keeps.", minimum=1)
    warmup_epochs: int = option(
        1,
        "Epochs that --forward-compress-method, --backward-compress-method and --dp-mode leave uncompressed.",
        minimum=0,
    )
    forward_bits: int = option(4, "Bits of --forward-compress-method.", minimum=1, maximum=8)
    forward_scale_method: Literal["max", "l2"] = option("max", "How --forward-compress-method finds its scales.")
    forward_scale_dims: str = option("(0,1)", "Dimensions (sample, token, channel) that share a scale.")
    backward_compress_method: Literal["none", "fixpoint"] = option("none", "Same as --compress pp-backward=METHOD.")
    backward_bits: int = option(8, "Bits of --backward-compress-method.", minimum=1, maximum=8)
    backward_scale_method: Literal["max", "l2"] = option("max", "How --backward-compress-method finds its scales.")
    backward_scale_dims: str = option("(0,1)", "Dimensions (sample, token, channel) that share a scale.")
    dp_mode: Literal["allreduce", "central_ps", "sharded_ps", "sharded_ps_compressed"] = option(
        "allreduce",
        "central_ps and sharded_ps are the same as --compress dp-grad=parameter-server,server=central (or sharded), "
        "sharded_ps_compressed as dp-grad=quantized-adam.",
    )
    dp_bits: int = option(8, "Bits of --dp-mode sharded_ps_compressed.", minimum=1, maximum=8)
    log_gradients_output_dir: str | None = derived(
        "--log-json-file", "Folder for what --log-gradients records.", metavar="FOLDER"
    )


_TOP_K_TYPES = "a Top-K --grad-comp-type or --emb-grad-comp-type"
NEEDS = {
    "save_json_path": "--save-json-log",
    "experiment_name": "--save-json-log",
    "comp_seed": "a PowerSGD compressor",
    "use_error_feedback": "--inter-grad-comp, or --grad-comp of type PowerSGD (Top-K keeps its residual by itself)",
    "grad_comp_type": "--grad-comp",
    "grad_comp_rank": "--grad-comp of type PowerSGD",
    "grad_comp_warm_up": "--grad-comp of type PowerSGD (Top-K has --stable-topk-threshold)",
    "selective_grad_comp": "--grad-comp",
    "selective_grad_comp_way": "--grad-comp and --selective-grad-comp",
    "density": _TOP_K_TYPES,
    "stable_topk_interval": "a stable Top-K --grad-comp-type or --emb-grad-comp-type",
    "stable_topk_threshold": _TOP_K_TYPES,
    "stable_topk_warmup_method": "a Top-K compressor and --stable-topk-threshold above 0",
    "stable_topk_range": "a stable Top-K --grad-comp-type that has a range",
    "stable_topk_density_warmup_steps": "the classic Top-K as --grad-comp-type, and a --density above 0",
    "inter_grad_comp_type": "--inter-grad-comp",
    "inter_grad_comp_rank": "--inter-grad-comp",
    "inter_grad_comp_warm_up": "--inter-grad-comp",
    "inter_grad_comp_epilogue_only": "--inter-grad-comp",
    "inter_acti_comp_type": "--inter-acti-comp",
    "inter_acti_comp_rank": "--inter-acti-comp",
    "inter_acti_comp_warm_up": "--inter-acti-comp",
    "emb_grad_comp_type": "--emb-grad-comp",
    "emb_grad_comp_rank": "--emb-grad-comp of type PowerSGD",
    "emb_grad_comp_warm_up": "--emb-grad-comp of type PowerSGD (Top-K has --stable-topk-threshold)",
    "emb_use_error_feedback": "--emb-grad-comp of type PowerSGD (Top-K keeps its residual by itself)",
    "mp_grad_comp_type": "--mp-grad-comp",
    "mp_grad_comp_rank": "--mp-grad-comp",
    "mp_grad_comp_warm_up": "--mp-grad-comp",
    "mp_acti_comp_type": "--mp-acti-comp",
    "mp_acti_comp_rank": "--mp-acti-comp",
    "mp_acti_comp_warm_up": "--mp-acti-comp",
    "forward_bits_act": "--forward-compress-method delta-lowbits",
    "max_activation_cache_size": "--forward-compress-method delta or delta-lowbits",
    "warmup_epochs": "--forward-compress-method, --backward-compress-method or --dp-mode sharded_ps_compressed",
    "forward_bits": "--forward-compress-method",
    "forward_scale_method": "--forward-compress-method",
    "forward_scale_dims": "--forward-compress-method",
    "backward_bits": "--backward-compress-method",
    "backward_scale_method": "--backward-compress-method",
    "backward_scale_dims": "--backward-compress-method",
    "dp_bits": "--dp-mode sharded_ps_compressed",
    "log_gradients_output_dir": "--log-gradients",
}
"""Field -> setting without which it has no effect; all other fields are always translated."""


def _translate(old: SectionValues, explicit: ExplicitValues, note: Note) -> None:
    """Translate the flags.

    Raises UserError for a compressor of the old systems that does not exist here.
    """
    specs = _optimus_gradients(old, explicit.get("parallel.pipeline_model_parallel_size") or 1)
    if old.inter_grad_comp:
        spec = "pp-backward=lowrank," + _low_rank(old, "inter_grad_comp", "lazy" if old.use_error_feedback else "off")
        specs.append(("--inter-grad-comp", spec + (",when=epilogue" if old.inter_grad_comp_epilogue_only else "")))
    if old.inter_acti_comp:
        specs.append(("--inter-acti-comp", "pp-forward=lowrank," + _low_rank(old, "inter_acti_comp", "")))
    fused_flag, fused = ("--emb-comm-opt ", ",fused=on") if old.emb_comm_opt else ("", "")
    if old.emb_grad_comp and old.emb_grad_comp_type.lower() in _EMBEDDING_TOP_K:
        specs.append((f"{fused_flag}--emb-grad-comp", f"embedding={_stable(old, 0)}{fused}"))
    elif old.emb_grad_comp:
        options = _low_rank(old, "emb_grad_comp", "local" if old.emb_use_error_feedback else "off")
        specs.append((f"{fused_flag}--emb-grad-comp", f"embedding=powersgd,{options}{fused}"))
    elif old.emb_comm_opt:
        specs.append(("--emb-comm-opt", "embedding=fused"))
    for switch, point in (("mp_acti_comp", "tp-forward"), ("mp_grad_comp", "tp-backward")):
        if getattr(old, switch):
            specs.append((flag_of(switch), f"{point}=powersgd," + _low_rank(old, switch, "")))
            note(
                f"{flag_of(switch)}: without the error feedback of Optimus-CC: {point} keeps no "
                "state, since recomputation and evaluation repeat it"
            )
    specs += [*_fixpoint("pp-forward", "forward", old), *_fixpoint("pp-backward", "backward", old)]
    if old.dp_mode == "sharded_ps_compressed":
        spec = f"quantized-adam,bits={old.dp_bits},warmup={old.warmup_epochs}epochs"
        specs.append((f"--dp-mode {old.dp_mode}", f"dp-grad={spec}"))
    elif old.dp_mode != "allreduce":
        spec = f"parameter-server,server={old.dp_mode.removesuffix('_ps')}"
        specs.append((f"--dp-mode {old.dp_mode}", f"dp-grad={spec}"))
    for flags, spec in specs:
        note(f"{flags} means --compress {spec}")
    if specs:
        user_specs = explicit.get("compression.compress", [])
        explicit["compression.compress"] = [*user_specs, *(spec for _, spec in specs)]
    if old.forward_compress_method.startswith("delta") and "data.sample_order" not in explicit:
        explicit["data.sample_order"] = "fixed"
        note("--forward-compress-method delta means --sample-order fixed: remembered samples must recur")
    record_files = []  # flag and its file of records; later ones win
    if explicit.get("logging.log_gradients") and old.log_gradients_output_dir is not None:
        record_files.append(("--log-gradients-output-dir", str(Path(old.log_gradients_output_dir) / "gradients.jsonl")))
    if old.collect_log_path is not None:
        record_files.append(("--collect-log-path", str(Path(old.collect_log_path) / "edgc.jsonl")))
    if old.save_json_log:
        file = Path(old.save_json_path) / f"{old.experiment_name or 'run'}.jsonl"
        record_files.append(("--save-json-log", str(file)))
    for flag, path in reversed(record_files):
        ours = explicit.setdefault("logging.log_json_file", path)
        if ours == path:
            note(f"{flag} means --log-json-file {path}")
        else:
            note(f"{flag}: no effect with --log-json-file {ours}, where all records go")


def _low_rank(old: SectionValues, switch: str, feedback: str) -> str:
    """Spec options shared by all Optimus-CC compressors."""
    kind = getattr(old, f"{switch}_type")
    if kind.lower() != "powersgd":
        raise UserError(f"{flag_of(switch)}-type {kind} does not exist here; use PowerSGD (the default)")
    rank, warmup = getattr(old, f"{switch}_rank"), getattr(old, f"{switch}_warm_up")
    text = f"rank={rank},seed={old.comp_seed}"
    if feedback:
        text += f",error-feedback={feedback}"
    # A float is a fraction of the run (1.0: the whole run), an integer a number of iterations.
    return text + (f",warmup={float(warmup)!r}" if warmup else "")


_STABLE = {
    "stable-topk": True,
    "stabletopkreducerwithrangebucketsefcorrectionresisgrad": True,
    "stabletopkreducerwithrangebucketsefcorrectionresisgradperlayer": False,
}
"""Radius reducer name -> whether the reducer has a range."""

_EMBEDDING_TOP_K = ("stable-topk", *(f"emb{name}" for name in _STABLE if name.startswith("stabletopk")))
"""Radius reducers of the tied embedding, without a range."""

_CLASSIC = ("topk", "topkreducerefcorrectionresisgradwarmup")


def _stable(old: SectionValues, reach: int) -> str:
    return f"stable-topk,density={old.density!r},interval={old.stable_topk_interval},range={reach}{_dense_warmup(old)}"


def _dense_warmup(old: SectionValues) -> str:
    dense = old.stable_topk_threshold and old.stable_topk_warmup_method == "Dense"
    return f",warmup={old.stable_topk_threshold}" if dense else ""


def _optimus_gradients(old: SectionValues, stages: int) -> list[tuple[str, str]]:
    if not old.grad_comp:
        return []
    flags, kind = "--grad-comp", old.grad_comp_type.lower()
    if kind in (*_STABLE, *_CLASSIC):  # the error feedback of Radius's reducers needs no flag
        flags += f" --grad-comp-type {old.grad_comp_type}"
    if kind in _CLASSIC:
        warmup_steps = old.density and old.stable_topk_density_warmup_steps
        density = f"1~{old.density!r}@{warmup_steps}" if warmup_steps else f"{old.density!r}"
        spec = f"dp-grad=topk,density={density}{_dense_warmup(old)}"
    elif kind in _STABLE:
        spec = f"dp-grad={_stable(old, old.stable_topk_range if _STABLE[kind] else 0)}"
    else:
        # The published reducer keeps input - average, not input - local contribution.
        options = _low_rank(old, "grad_comp", "aggregate" if old.use_error_feedback else "off")
        spec = f"dp-grad=powersgd,{options}"
        if old.collect_log_path is not None:
            # EDGC adapts the rank and never read --grad_comp_rank; if given, that is the maximum rank.
            options = options if "grad_comp_rank" in old.names else options.partition(",")[2]
            spec, flags = f"dp-grad=edgc,{options},warmup-ends=error", f"{flags} --collect-log-path"
    if old.selective_grad_comp:
        first_stages = old.selective_grad_comp_way
        spec += f",stages=first:{min(first_stages, stages) if stages > 1 else first_stages}"  # at most all stages
        flags += " --selective-grad-comp"
    return [(flags, spec)]


_SCALES = {"01": "channel", "012": "tensor"}


def _fixpoint(point: str, direction: str, old: SectionValues) -> list[tuple[str, str]]:
    """Spec of the AQ-SGD quantizer: a scale per channel or tensor, and a grid that clips the positive peak."""
    method = getattr(old, f"{direction}_compress_method")
    if method == "none":
        return []
    scale_dims = getattr(old, f"{direction}_scale_dims")
    dims = "".join(sorted(c for c in scale_dims if c.isdigit()))
    if dims not in _SCALES:
        raise UserError(
            f"--{direction}-scale-dims {scale_dims}: the choices are (0,1), a scale for each channel, and (0,1,2), a "
            "scale for the tensor"
        )
    spec = f"{point}={method},bits={getattr(old, f'{direction}_bits')},scale={_SCALES[dims]},grid=asymmetric"
    if getattr(old, f"{direction}_scale_method") == "l2":
        spec += ",scale-method=l2"
    warmup = old.warmup_epochs
    if method != "fixpoint":
        spec += f",cache={old.max_activation_cache_size},first-bits=32,cache-dtype=fp16"
        spec += f",cache-bits={old.forward_bits_act}" if method == "delta-lowbits" else ""
        warmup -= 1  # the first epoch is uncompressed anyway
    if warmup > 0:
        spec += f",warmup={warmup}epochs"
    return [(f"--{direction}-compress-method", spec)]


LEGACY = Dialect(section="legacy", config=LegacyConfig, translate=_translate, needs=NEEDS)
