"""Checks of data, tokenizer, checkpoint and logging settings."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron.base.errors import UserError
from megatron.config.run import RunConfig

LEAST_WEIGHT, MOST_WEIGHT = 1e-12, 1e12
"""Of a data set in a blend, and of a share of --split; sums and quotients of them are exact enough."""

# The files that each tokenizer cannot do without.
_TOKENIZER_NEEDS: dict[str, tuple[str, ...]] = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "HFTokenizer": ("tokenizer_model",),
    "NullTokenizer": ("vocab_size",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
}


def parse_split(split: str) -> tuple[float, float, float]:
    """The shares of training, validation and test, summing to 1, from text such as "969,30,1".

    Fewer than three numbers leave the rest at 0. Raises UserError for anything else.
    """
    words = re.split(r"[,/]", split.strip())
    try:
        shares = [_ascii_number(word) for word in words]
    except ValueError:
        shares = []
    fit = all(share == 0 or LEAST_WEIGHT <= share <= MOST_WEIGHT for share in shares)
    if not 1 <= len(shares) <= 3 or not fit:
        raise UserError(f"--split {split}: expected up to three shares such as 969,30,1, none of them negative")
    total = sum(shares)
    if total <= 0:
        raise UserError(f"--split {split}: the shares sum to 0; give at least one that is positive")
    shares += [0.0] * (3 - len(shares))
    return shares[0] / total, shares[1] / total, shares[2] / total


def _ascii_number(word: str) -> float:
    if not word.isascii():
        raise ValueError(word)
    return float(word)


def parse_blend(words: Sequence[str], flag: str) -> list[tuple[float, str]]:
    """Pairs (weight, path) from "PATH" or "W1 P1 W2 P2 ...". Raises UserError naming the flag."""
    if len(words) == 1:
        return [(1.0, words[0])]
    if len(words) % 2 != 0:
        raise UserError(f"{flag}: {len(words)} words are not pairs; write WEIGHT PATH WEIGHT PATH ...")
    pairs = []
    for weight_word, path in zip(words[0::2], words[1::2], strict=True):
        try:
            weight = _ascii_number(weight_word)
        except ValueError:
            raise UserError(f"{flag}: {weight_word!r} is not a weight; write WEIGHT PATH WEIGHT PATH ...") from None
        if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
            raise UserError(
                f"{flag}: the weight {weight_word} of {path} must be a positive number from {LEAST_WEIGHT:g} to "
                f"{MOST_WEIGHT:g}; leave a path out to drop it"
            )
        pairs.append((weight, path))
    return pairs


def check_data(config: RunConfig) -> None:
    """Raise UserError for dataset paths, a split or tokenizer files that do not fit together."""
    data, tokenizer = config.data, config.tokenizer
    parse_split(data.split)
    parts = (
        (data.train_data_path, "--train-data-path"),
        (data.valid_data_path, "--valid-data-path"),
        (data.test_data_path, "--test-data-path"),
    )
    for words, flag in ((data.data_path, "--data-path"), *parts):
        parse_blend(words, flag)
    for words, flag in parts:
        if words and data.data_path:
            raise UserError(f"--data-path and {flag} exclude each other; leave one of them out")
    given = [flag for words, flag in parts if words]
    if given and not data.train_data_path and not config.validation.skip_train:
        raise UserError(f"{given[0]} without --train-data-path leaves nothing to train on; add --train-data-path")
    kind = tokenizer.tokenizer_type
    if kind is not None:
        needed = _TOKENIZER_NEEDS[kind]
        missing = [f"--{name.replace('_', '-')}" for name in needed if getattr(tokenizer, name) is None]
        if missing:
            raise UserError(f"--tokenizer-type {kind} needs {' and '.join(missing)}; add what is missing")


def check_data_given(config: RunConfig) -> None:
    """Raise UserError when no dataset is given. For programs that read one; `resolve` does not ask."""
    data = config.data
    if not (data.data_path or data.train_data_path or data.valid_data_path or data.test_data_path):
        raise UserError("no dataset: give its prefix (without .bin or .idx) with --data-path")


def _check_trace(config: RunConfig) -> None:
    start, end = config.logging.profile_step_start, config.logging.profile_step_end
    if end <= start:
        raise UserError(
            f"--profile-step-end {end} must be greater than --profile-step-start {start}; use {start + 2} for a trace "
            "of two iterations"
        )


def _check_gradients(config: RunConfig) -> None:
    if config.logging.log_gradients and config.logging.log_json_file is None:
        raise UserError("--log-gradients writes to --log-json-file FILE; add it or leave --log-gradients out")
    if config.logging.log_gradients_bins and not config.logging.log_gradients:
        raise UserError(
            f"--log-gradients-bins {config.logging.log_gradients_bins} is for the records of --log-gradients; add it"
        )
    if config.logging.log_gradients and config.parallel.use_distributed_optimizer:
        raise UserError(
            "--log-gradients looks at whole gradients, of which --use-distributed-optimizer leaves each rank a share; "
            "leave one of them out"
        )


def check_outputs(config: RunConfig) -> None:
    """Raise UserError for checkpoint settings that need another flag, and for a trace of nothing."""
    _check_trace(config)
    _check_gradients(config)
    checkpoint = config.checkpoint
    needs = (
        (checkpoint.save_interval is not None, "--save-interval", checkpoint.save, "--save"),
        (checkpoint.async_save, "--async-save", checkpoint.save, "--save"),
        (checkpoint.keep_last is not None, "--keep-last", checkpoint.save, "--save"),
        (checkpoint.overwrite_checkpoints, "--overwrite-checkpoints", checkpoint.save, "--save"),
        (checkpoint.no_save_optim, "--no-save-optim", checkpoint.save, "--save"),
        (checkpoint.no_save_rng, "--no-save-rng", checkpoint.save, "--save"),
        (checkpoint.ckpt_step is not None, "--ckpt-step", checkpoint.load, "--load"),
        (checkpoint.finetune, "--finetune", checkpoint.load, "--load"),
        (checkpoint.use_checkpoint_args, "--use-checkpoint-args", checkpoint.load, "--load"),
        (checkpoint.exit_on_missing_checkpoint, "--exit-on-missing-checkpoint", checkpoint.load, "--load"),
    )
    for given, flag, folder, needed in needs:
        if given and folder is None:
            raise UserError(f"{flag} needs {needed} FOLDER; add it or leave {flag} out")
