"""A checkpoint of any layout as one model in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron.checkpoint.files import checkpoint_folder
from megatron.checkpoint.load import load_tensors, read_tracker
from megatron.checkpoint.model_state import OPTIMIZER, model_tensors
from megatron.checkpoint.save import CONFIG
from megatron.comm.ledger import Ledger
from megatron.comm.policy import CompressionPlan
from megatron.comm.tensor import TensorComm
from megatron.config.errors import UserError
from megatron.config.recompute import RecomputeConfig
from megatron.config.run import RunConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.model.gpt import GPTStage
from megatron.model.stages import build_stages
from megatron.tokenizer.api import Tokenizer
from megatron.tokenizer.build import build_tokenizer
from megatron.topology.topology import single_process


@dataclass(frozen=True)
class LoadedModel:
    """A whole model on one device, and what it was trained with.

    Args:
        stage: the model; ``stage(tokens_bs, context)`` then ``stage.logits``.
        tokenizer: the run's, or the one given instead.
        config: of the run that saved it.
        iteration: of the checkpoint.
    """

    stage: GPTStage
    tokenizer: Tokenizer
    config: RunConfig
    iteration: int | str


def load_model(
    root: str | Path,
    *,
    tokenizer: TokenizerConfig | None = None,
    device: torch.device | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> LoadedModel:
    """Loads the newest checkpoint below ``root``, whatever its tensor- and pipeline-parallel sizes were.

    Args:
        root: the folder that ``--save`` wrote to.
        tokenizer: fields that are set here replace the run's.
        device: where the model lives; default: CUDA when there is one, else the CPU.
        log: takes lines for the user.

    Raises:
        UserError: when there is no checkpoint, or it cannot be used.
    """
    iteration = read_tracker(root)
    if iteration is None:
        raise UserError(f"--load {root} holds no checkpoint; name the folder that --save wrote to")
    config = RunConfig.load_yaml(checkpoint_folder(Path(root), iteration) / CONFIG)
    chosen = _tokenizer_config(config, tokenizer)
    built = build_tokenizer(chosen)
    topology = single_process(device or torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    plan = CompressionPlan({})
    comm = TensorComm(topology.tp, Ledger(), plan)
    (stage,) = build_stages(
        config.model,
        RecomputeConfig(),
        topology.layout,
        0,
        built.vocab_size,
        comm,
        topology.device,
        config.precision.params_dtype,
        config.training.seed,
    )
    load_tensors(
        root, iteration, model_tensors([stage]), allow_unexpected=lambda name: name.startswith(OPTIMIZER), log=log
    )
    return LoadedModel(stage.eval(), built, config, iteration)


def _tokenizer_config(config: RunConfig, given: TokenizerConfig | None) -> TokenizerConfig:
    saved = config.tokenizer
    if given is None:
        return saved
    changes = {name: value for name, value in vars(given).items() if value}
    return replace(saved, **changes)
