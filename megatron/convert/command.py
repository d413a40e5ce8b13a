"""Converts checkpoints between our own format, Hugging Face folders and the classic Megatron layout.

    python tools/ckpt_convert.py --load checkpoints --save gpt2-mine --to hf
    python tools/ckpt_convert.py --load gpt2 --save checkpoints --to megatron-cc
    python tools/ckpt_convert.py --load checkpoints --save classic --to classic --target-tensor-model-parallel-size 2
    python tools/ckpt_convert.py --load checkpoints --iteration 1000 --save half --to hf --dtype bf16

--load may be any layout of ours, a Hugging Face folder (GPT-2, GPT-NeoX, Llama, Mistral, Ministral, Mixtral, Qwen2,
Qwen2-MoE, Qwen3, Qwen3-MoE, Gemma 2, Gemma 3, MegatronBert or DeBERTa-v2), or mp_rank_TT[_PPP] files of Megatron-LM and
its forks (GPT; checkpoint versions 0 to 3, any tensor- and pipeline-parallel size); the format is detected. Only
weights are converted: continue from a converted checkpoint with pretrain_gpt.py (or pretrain_bert.py) --load DIR
--finetune --use-checkpoint-args, or fine-tune it with tasks/main.py --pretrained-checkpoint DIR. Task heads of GPT-2,
MegatronBert and DeBERTa-v2 are converted, too. The tokenizer is that of the flags, else of our own checkpoint, else of
the files in --load. Tensors are read and written one by one, so memory holds the largest tensor, not the model. --save
is either complete or absent.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from megatron.base.errors import UserError
from megatron.base.user_text import flag_of
from megatron.checkpoint.files import TRACKER
from megatron.checkpoint.find import complete_iterations
from megatron.config.flags import parse_args
from megatron.config.tokenizer import TokenizerConfig
from megatron.convert.atomic_folder import atomic_folder
from megatron.convert.classic import find_classic, read_classic
from megatron.convert.classic_write import write_classic
from megatron.convert.hugging_face import is_hf, read_hf, write_hf
from megatron.convert.model import Weights, check_complete
from megatron.convert.ours import read_ours, write_ours
from megatron.convert.tokenizer_files import build_fitting_tokenizer, find_tokenizer
from megatron.data.interrupt import run_command
from megatron.tokenizer.vocabulary import fit_vocab_size

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    arg_parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arg_parser.add_argument("--load", "-i", "-in_file", required=True, metavar="DIR", help="checkpoint to convert")
    arg_parser.add_argument(
        "--save", "-o", "-saved_dir", required=True, metavar="DIR", help="folder for the result, empty or new"
    )
    arg_parser.add_argument("--to", choices=("hf", "megatron-cc", "classic"), help="format of the result")
    arg_parser.add_argument(
        "--iteration", type=int, metavar="N", help="iteration of our own or a classic checkpoint (the newest)"
    )
    arg_parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        help="dtype of the result (unchanged); fp32 takes the optimizer's weights of a run in lower precision",
    )
    arg_parser.add_argument(
        "--target-tensor-model-parallel-size",
        "--target-tensor-parallel-size",
        "-i_g",
        "-infer_gpu_num",
        type=int,
        default=1,
        metavar="N",
        help="for --to classic (1)",
    )
    arg_parser.add_argument(
        "--target-pipeline-model-parallel-size",
        "--target-pipeline-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="for --to classic (1)",
    )
    arg_parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="vocabulary entries without padding, if a classic file lacks them"
    )
    tokenizer = arg_parser.add_argument_group("tokenizer", "instead of that of --load")
    tokenizer.add_argument("--tokenizer-type", metavar="TYPE", help="as in training (determined by the files)")
    tokenizer.add_argument("--vocab-file", metavar="FILE", help="vocab.json, or a WordPiece vocab.txt")
    tokenizer.add_argument("--merge-file", metavar="FILE", help="merges.txt")
    tokenizer.add_argument("--tokenizer-model", metavar="PATH", help="SentencePiece model, or Hugging Face folder")
    tokenizer.add_argument("--no-tokenizer", action="store_true", help="do not copy a tokenizer")
    forks = arg_parser.add_argument_group("command lines of Optimus-CC and Megatron-DeepSpeed")
    forks.add_argument("--model-type", metavar="GPT", help="makes --to classic the default")
    forks.add_argument("-p", "-processes", "-weight_data_type", dest="ignored", metavar="X", help="has no effect")
    return arg_parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; training flags, which the forks' tools require, are ignored.

    Raises:
        UserError: when a flag is unknown or has a bad value, or the target format cannot be determined.
    """
    arg_parser = parser()
    options, training_arguments = arg_parser.parse_known_args(arguments)
    if training_arguments:
        parse_args(training_arguments, prog=arg_parser.prog)
        print(
            f"{arg_parser.prog}: ignored, since the model is in the checkpoint: {' '.join(training_arguments)}",
            file=sys.stderr,
        )
    if options.model_type not in (None, "GPT"):
        raise UserError(
            f"--model-type {options.model_type}: only GPT has a classic layout; leave the flag out, and give --to"
        )
    if options.to is None and options.model_type is None:
        raise UserError("--to is missing: hf, megatron-cc or classic")
    options.to = options.to or "classic"
    for name in ("target_tensor_model_parallel_size", "target_pipeline_model_parallel_size"):
        flag = f"{flag_of(name)} {getattr(options, name)}"
        if getattr(options, name) < 1:
            raise UserError(f"{flag}: give at least 1")
        if getattr(options, name) > 1 and options.to != "classic":
            raise UserError(f"{flag}: only --to classic splits a model; leave it out")
    if options.iteration is not None and options.iteration < 0:
        raise UserError(f"--iteration {options.iteration}: iterations count from 0")
    return options


def read(options: argparse.Namespace) -> Weights:
    """Read the weights to convert.

    Raises:
        UserError: when they cannot be converted.
    """
    folder = Path(options.load)
    classic = find_classic(folder, options.iteration)
    if classic is None and options.vocab_size is not None:
        raise UserError(f"--vocab-size {options.vocab_size}: only classic files need it; leave it out")
    if classic is not None:
        weights = read_classic(classic, options.vocab_size)
    elif (folder / TRACKER).is_file() or complete_iterations(folder):
        weights = read_ours(folder, options.iteration, precise=options.dtype == "fp32")
    elif is_hf(folder):
        if options.iteration is not None:
            raise UserError(f"--iteration {options.iteration}: {folder} is a Hugging Face folder, which has none")
        weights = read_hf(folder)
    elif not folder.is_dir():
        raise UserError(f"--load {folder}: there is no such folder")
    else:
        raise UserError(
            f"--load {folder} holds neither a checkpoint ({TRACKER}) nor a Hugging Face model (config.json)"
        )
    check_complete(weights, str(folder))
    # The tokenizer of the flags, else of our own checkpoint, else of the files beside it; paths inside foreign
    # checkpoints are not trusted.
    folders = [folder] if classic in (None, folder) else [classic, folder]
    names = ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model")
    settings = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.no_tokenizer:
        if settings:
            raise UserError(f"--no-tokenizer contradicts {flag_of(next(iter(settings)))}; leave one of them out")
        tokenizer = TokenizerConfig()
    elif not settings:
        tokenizer = weights.tokenizer if weights.tokenizer.tokenizer_type else find_tokenizer(*folders)
    else:
        if "tokenizer_type" not in settings:
            model = Path(settings.get("tokenizer_model", ""))
            by_model = "HFTokenizer" if model.is_dir() else "SentencePieceTokenizer"
            settings["tokenizer_type"] = by_model if "tokenizer_model" in settings else "GPT2BPETokenizer"
        tokenizer = fit_vocab_size(TokenizerConfig(**settings), weights.vocab_size)
        build_fitting_tokenizer(tokenizer, weights.vocab_size)
    dtype = DTYPES.get(options.dtype)
    entries = {name: entry.to(dtype).require_finite(name, folder) for name, entry in weights.entries.items()}
    return dataclasses.replace(weights, entries=entries, tokenizer=tokenizer)


def convert(options: argparse.Namespace) -> Weights:
    """Run the conversion that the command line describes.

    Raises:
        UserError: when it cannot be done; no files are left behind then.
    """
    try:
        weights = read(options)
    except OSError as error:
        raise UserError(f"{error.filename or options.load}: {error.strerror or error}") from error
    # A model that cannot be written is refused at once; with the delay, the bar does not appear before that message.
    bar = tqdm(total=weights.nbytes, unit="B", unit_scale=True, desc="converted", delay=1.0)
    with bar, atomic_folder(Path(options.save)) as folder:
        if options.to == "megatron-cc":
            write_ours(weights, folder, bar.update)
        elif options.to == "hf":
            write_hf(weights, folder, bar.update)
        else:
            tp, pp = options.target_tensor_model_parallel_size, options.target_pipeline_model_parallel_size
            write_classic(weights, folder, tp, pp, bar.update)
    return weights


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 on success, or 2 after printing the reason."""

    def body() -> None:
        options = parse(arguments)
        weights = convert(options)
        if weights.left_out:
            print(f"ckpt_convert: note: {weights.left_out} of {options.load} is left out", file=sys.stderr)
        print(f"{options.save}: {len(weights.entries)} tensors, {weights.nbytes / 1e6:,.1f} MB")

    return run_command(body, "ckpt_convert")
