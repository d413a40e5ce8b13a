"""Common flags of the programs that use a trained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megatron.base.errors import UserError
from megatron.base.option import FieldOption, derived, field_options, option, required
from megatron.checkpoint.load import saved_config
from megatron.config.flags import ParsedSections, build_parser, run_table
from megatron.config.parallel import MAX_MINUTES
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.translate.rules import SWITCH, VALUE, VALUES, KnownFlag, OldFlag, Shortcut
from megatron.distributed.layout import Layout
from megatron.distributed.process_group import LaunchEnvironment, pick_device
from megatron.distributed.topology import Topology, build_topology, single_process
from megatron.inference.model import LoadedModel, check_generates, inference_layout, load_model
from megatron.inference.sampling import Sampling

_NOT_NEEDED = "it belongs to training, and the checkpoint holds the model"


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The trained model. Its shape, precision and tokenizer come from the checkpoint."""

    load: str = required(
        "Folder that --save wrote to; tools/ckpt_convert.py creates one from other formats.", metavar="DIR"
    )
    ckpt_step: int | None = derived(
        "the newest", "Iteration of the checkpoint.", unit="iterations", minimum=0, aliases=("iteration",)
    )
    tensor_model_parallel_size: int = option(1, "Number of ranks that share each layer.", unit="ranks", minimum=1)
    pipeline_model_parallel_size: int = option(1, "Number of pipeline stages.", unit="stages", minimum=1)
    distributed_backend: Literal["nccl", "gloo"] = derived("nccl with CUDA, else gloo", "Communication library.")
    distributed_timeout_minutes: float = option(
        10.0, "How long a rank waits for the others.", unit="minutes", minimum=0.01, maximum=MAX_MINUTES
    )

    @property
    def backend(self) -> Literal["nccl", "gloo"]:
        """Backend, with the default for this machine."""
        return self.distributed_backend or ("nccl" if torch.cuda.is_available() else "gloo")


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Sampling of tokens."""

    greedy: bool = option(False, "Always take the most likely token.")
    temperature: float = option(
        1.0, "Divisor of the logits: below 1 sharpens, above 1 flattens the distribution.", above=0
    )
    top_k: int = option(0, "Sample from this many most likely tokens; 0: all.", unit="tokens", minimum=0)
    top_p: float = option(
        0.0, "Sample from the smallest set of most likely tokens with this probability; 0: all.", minimum=0, maximum=1
    )
    min_p: float = option(
        0.0, "Exclude tokens below this fraction of the likeliest token's probability; 0: none.", minimum=0, maximum=1
    )
    repetition_penalty: float = option(
        1.0, "Divides positive logits, and multiplies negative logits, of tokens already in the text.", above=0
    )
    presence_penalty: float = option(0.0, "Subtracted from the logits of tokens already in the continuation.")
    frequency_penalty: float = option(0.0, "Subtracted from the same logits once for each occurrence.")
    stop_token_ids: list[int] = option(  # noqa: RUF009
        [], "Tokens that end a text, like the end-of-document token.", metavar="ID", minimum=0
    )
    out_seq_length: int = option(1024, "Maximum number of new tokens per text.", unit="tokens", minimum=1)
    seed: int = option(1234, "Seed of sampling: text number i uses seed + i.", minimum=0, maximum=2**32 - 1)
    recompute: bool = option(
        False, "Recompute the whole text for each token instead of caching keys and values (to check the cache)."
    )

    def sampling(self) -> Sampling:
        """Validated sampling options.

        Raises:
            UserError: when flags exclude each other.
        """
        return Sampling(
            self.temperature,
            self.top_k,
            self.top_p,
            self.greedy,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )


COMMON: Mapping[str, type] = {"model": ModelFlags, "tokenizer": TokenizerConfig}


def parse_flags(
    argv: Sequence[str],
    sections: Mapping[str, type],
    prog: str,
    description: str,
    shortcuts: Sequence[Shortcut] = (),
) -> ParsedSections:
    """Parse a command line with the sections of ``COMMON`` and of the program, and its shortcuts.

    Training flags, which scripts for other Megatrons pass to every program, are accepted and noted.

    Raises:
        UserError: when an argument is unknown or invalid; the message is a single line.
    """
    all_sections = {**COMMON, **sections}
    used = {flag for name, cls in all_sections.items() for field in field_options(name, cls) for flag in field.flags}
    used |= {shortcut.name for shortcut in shortcuts}
    training = [
        KnownFlag(
            name=flag,
            arity=_arity(target),
            refused=False,
            reason=target.reason if isinstance(target, KnownFlag) else _NOT_NEEDED,
        )
        for flag, target in run_table().spellings()
    ]
    training += [
        KnownFlag(name=flag, arity=_arity(field), refused=False, reason="each request or task sets it")
        for field in field_options("sampling", SamplingFlags)
        for flag in field.flags
    ]
    remaining_flags = {known_flag.name: known_flag for known_flag in training if known_flag.name not in used}
    parser = build_parser(all_sections, prog, description, old=[*shortcuts, *remaining_flags.values()])
    parsed = parser.parse(argv)
    training_notes = [note for note in parsed.notes if note.endswith(_NOT_NEEDED)]
    if training_notes:
        names = " ".join(note.split(" ", 1)[0] for note in training_notes)
        parsed.notes = [note for note in parsed.notes if note not in training_notes]
        parsed.notes.append(f"not needed, since the checkpoint holds the model: {names}")
    return parsed


def _arity(target: FieldOption | OldFlag) -> str:
    if isinstance(target, OldFlag):
        return target.arity
    if target.is_switch:
        return SWITCH
    return VALUES if target.is_list and not target.option.repeatable else VALUE


def open_model(model: ModelFlags, tokenizer: TokenizerConfig, layout: Layout, env: LaunchEnvironment) -> LoadedModel:
    """Load the model that the flags name on this rank.

    Args:
        model, tokenizer: sections of the flags.
        layout: the layout that ``check_layout`` returned.
        env: environment of this process; with several processes, torch's process group exists.

    Raises:
        UserError: on every rank, when the checkpoint cannot be used.
    """
    topology = open_topology(model, layout, env)
    return load_model(model.load, iteration=model.ckpt_step, tokenizer=tokenizer, topology=topology)


def open_topology(model: ModelFlags, layout: Layout, env: LaunchEnvironment) -> Topology:
    """Build the topology of all launched ranks, or of this process alone."""
    device = pick_device(model.backend, env.local_rank)
    return build_topology(layout, device) if env.world_size > 1 else single_process(device)


def check_layout(model: ModelFlags, env: LaunchEnvironment, *, replicas: bool) -> Layout:
    """Validate the requested layout before the process group is created, and return it.

    Args:
        model: section of the flags.
        env: environment of this process.
        replicas: whether the program supports several replicas of the model.

    Raises:
        UserError: when the model does not support the layout, or there is no checkpoint.
    """
    config, _ = saved_config(model.load, model.ckpt_step)
    check_generates(config, model.load)
    tp, pp = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    layout = inference_layout(config, tp, pp, env.world_size, model.backend)
    if layout.dp > 1 and not replicas:
        raise UserError(
            f"{env.world_size} processes hold {layout.dp} copies of a model with --tensor-model-parallel-size {tp} x "
            f"--pipeline-model-parallel-size {pp}, but only one can be used: start {tp * pp} processes"
        )
    if model.backend == "nccl" and env.world_size > 1 and not torch.cuda.is_available():
        raise UserError("--distributed-backend nccl needs CUDA devices; use gloo on CPUs")
    return layout
