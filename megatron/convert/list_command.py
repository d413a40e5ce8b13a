"""Lists checkpoints with their contents, layout, size and integrity.

    python tools/ckpt.py ls checkpoints
    python tools/ckpt.py ls checkpoints --iteration 300 --config --tensors
    python tools/ckpt.py ls checkpoints/iter_0000300 --verify
    python tools/ckpt.py ls checkpoints --json

Prints a line for each checkpoint, and a description of the newest (or of the only one requested). "complete" means that
the table of contents is intact and all files have their recorded sizes; --verify also compares the checksums of all
tensors and documents. The exit status is 2 if a checkpoint is damaged.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from megatron.base.errors import UserError
from megatron.config.memory import format_bytes
from megatron.convert.contents import Contents, find_checkpoints, inspect_checkpoint, tracker_problem

_SHAPE = (
    ("num_layers", "layers"),
    ("decoder_num_layers", "layers of the decoder"),
    ("hidden_size", "hidden"),
    ("num_attention_heads", "heads"),
    ("num_experts", "experts"),
    ("seq_length", "tokens per sample"),
    ("decoder_seq_length", "in the decoder"),
)


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    arg_parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = arg_parser.add_subparsers(dest="command", required=True, metavar="ls")
    ls = commands.add_parser("ls", help="list checkpoints", description="Lists checkpoints.")
    ls.add_argument(
        "folder", type=Path, metavar="FOLDER", help="folder that --save wrote to, or an iter_... folder in it"
    )
    ls.add_argument("--iteration", type=int, metavar="N", help="this checkpoint only")
    ls.add_argument("--verify", action="store_true", help="read all tensors and documents and compare their checksums")
    ls.add_argument("--config", action="store_true", help="also print the run's configuration")
    ls.add_argument("--tensors", action="store_true", help="also print each tensor's type and shape")
    ls.add_argument("--json", action="store_true", help="print all of it as JSON")
    return arg_parser


def _description(checkpoint: Contents, options: argparse.Namespace) -> Iterator[str]:
    """Lines that describe the contents of a checkpoint, with the details that were requested."""
    layout = ", ".join(f"{name} {size}" for name, size in checkpoint.layout.items())
    if checkpoint.saved is not None:
        ranks = f"{checkpoint.ranks} rank{'s' if checkpoint.ranks > 1 else ''}"
        time = datetime.fromtimestamp(checkpoint.saved, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        yield f"  saved {time} by {ranks}{': ' + layout if layout else ''}"
    model = checkpoint.config.get("model")
    if isinstance(model, Mapping):
        texts = []
        for name, word in _SHAPE:
            value = model.get(name)
            if value not in (None, []):
                texts.append(f"{' '.join(map(str, value)) if isinstance(value, list) else value} {word}")
        yield "  model: " + ", ".join(texts)
    if checkpoint.position:
        yield "  position: " + ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in checkpoint.position.items())
    for kind, info in checkpoint.kinds.items():
        dtypes = ", ".join(info.dtypes)
        size = format_bytes(info.bytes)
        yield f"  {kind:<24} {info.tensors:>5} tensors {info.numbers:>15,} numbers {size:>10}  {dtypes}"
    yield from (f"  {name:<24} {format_bytes(size):>10}" for name, size in sorted(checkpoint.files.items()))
    if options.tensors:
        yield from (f"  {name}  {dtype} {list(shape)}" for name, (dtype, shape) in checkpoint.shapes.items())
    if options.config:
        for section, values in checkpoint.config.items():
            yield f"  {section}:"
            if isinstance(values, Mapping):
                yield from (f"    {name}: {value}" for name, value in values.items())


def show(options: argparse.Namespace) -> bool:
    """Print the requested checkpoints; return whether all are intact.

    Raises:
        UserError: when there is no such checkpoint.
    """
    root, available = find_checkpoints(options.folder)
    if options.iteration is not None and options.iteration not in available:
        existing = ", ".join(map(str, available))
        raise UserError(
            f"--iteration {options.iteration}: {options.folder} has no such checkpoint; there are {existing}"
        )
    selected = available if options.iteration is None else [options.iteration]
    checkpoints = [inspect_checkpoint(root, iteration, verify=options.verify) for iteration in selected]
    tracker_error = tracker_problem(root) if root == options.folder else None
    if options.json:
        contents = [
            {**asdict(checkpoint), "folder": str(checkpoint.folder), "bytes": checkpoint.bytes}
            for checkpoint in checkpoints
        ]
        print(json.dumps({"folder": str(root), "problem": tracker_error, "checkpoints": contents}, indent=1))
    else:
        detailed = (
            checkpoints[0]
            if len(checkpoints) == 1
            else next((checkpoint for checkpoint in checkpoints if checkpoint.newest), checkpoints[-1])
        )
        for checkpoint in checkpoints:
            mark = " (newest)" if checkpoint.newest else ""
            problem = f": {checkpoint.problem}" if checkpoint.problem else ""
            size = format_bytes(checkpoint.bytes)
            print(f"{checkpoint.folder.name:<16} {size:>10}  {checkpoint.state}{problem}{mark}")
            if checkpoint is detailed:
                print("\n".join(_description(checkpoint, options)))
        if tracker_error:
            print(f"warning: {tracker_error}")
    return all(checkpoint.state != "damaged" for checkpoint in checkpoints)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 when a checkpoint is damaged or there is none."""
    options = parser().parse_args(arguments)
    try:
        return 0 if show(options) else 2
    except UserError as error:
        print(f"ckpt: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # as with `| head`
        sys.stdout = None
        return 0
    except OSError as error:
        print(f"ckpt: error: {error.filename or options.folder}: {error.strerror}", file=sys.stderr)
        return 2
