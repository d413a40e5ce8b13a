"""Checks the certificate of a checkpoint that a run with --certificate saved.

    megatron-cc-verify checkpoints                        the newest checkpoint
    megatron-cc-verify checkpoints/iter_0000300 --strict
    python -m megatron.checkpoint.verify_command checkpoints

Prints a line for each check. At the first difference, it prints only that, and the exit status is 2:

  files      every file of the checkpoint, including its configuration, has the SHA-256 in the certificate
  statements the certificate agrees with the checkpoint's own values
  bytes      the ledger agrees with the ranks' connections and network interfaces, within 1% plus message headers,
             where their counters could be read; interfaces also carry the traffic of other programs
  residuals  each sampled message plus its residual equals the tensor to be sent
  replicas   ranks that must hold the same numbers hold them, bit by bit
  auto       the choice of --compress auto, with the predicted and the measured time of an iteration
  machine    code, kernels, torch and input files equal the run's on this machine; otherwise a warning, or an error
             with --strict

Nothing is unpickled, and nothing but the folder and the run's input files is read.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import torch

from megatron.base.code_digest import code_digest
from megatron.base.errors import UserError
from megatron.base.regular import fingerprint, open_regular
from megatron.checkpoint.certificate import CERTIFICATE, Certificate, Statements, TrafficSpan, read_certificate
from megatron.checkpoint.files import checkpoint_folder
from megatron.checkpoint.find import read_tracker
from megatron.checkpoint.manifest import MANIFEST, read_manifest
from megatron.checkpoint.plain import decode_plain
from megatron.checkpoint.save import COMMON
from megatron.checkpoint.storage import READ_BYTES
from megatron.compression.spec import point_name
from megatron.config.memory import format_bytes
from megatron.kernels.native import kernels_digest

BYTES_TOLERANCE = 0.01
HEADER_BYTES = 320
"""Maximum bytes that gloo adds to a message each time a rank passes it on: 2 (n - 1) times in a ring of n ranks."""
RESIDUAL_TOLERANCE = 1e-6
"""Largest relative error of a message plus its residual, which are added in fp32."""


def verify(folder: Path, strict: bool = False) -> Iterator[str]:
    """Check a checkpoint against its certificate; yield a line for each check.

    Raises:
        UserError: for the first thing that differs.
    """
    certificate = read_certificate(folder)
    statements = certificate.statements
    yield f"files: {_check_files(folder, certificate)}"
    yield from _check_statements(folder, certificate)
    yield from (f"bytes: {_check_bytes(folder, span)}" for span in statements.traffic)
    for entry in statements.samples:
        label = f"{entry.point}: relative error at most {entry.worst_error:.2g} in {entry.samples} samples"
        if not entry.residual:
            yield f"residuals: {label} of messages without a residual, {entry.sha256[:16]}"
        elif entry.worst_error > RESIDUAL_TOLERANCE:
            raise UserError(f"{folder}: residuals do not add up at {label}, above {RESIDUAL_TOLERANCE:g}")
        else:
            yield f"residuals: {label} of message plus residual, {entry.sha256[:16]}"
    yield from (f"residuals: {point}: not sampled: {reason}" for point, reason in statements.not_sampled.items())
    if statements.differences:
        raise UserError(f"{folder}: replicas differ: {statements.differences[0]}")
    yield f"replicas: all {certificate.ranks} ranks agree bit by bit on the numbers they share"
    if statements.auto is not None:
        auto = statements.auto
        specs_text, measured_text = " ".join(auto.specs) or "nothing", "not measured yet"
        if set(auto.increases) - set(auto.specs):
            specs_text += f" now; times of the choice, {' '.join(auto.increases)}"
        if auto.measured_s is not None:
            measured_text = f"measured {auto.measured_s:.3g} s"
        yield (
            f"auto: {specs_text}: predicted {auto.predicted_s:.3g} s an iteration, {auto.uncompressed_s:.3g} s "
            f"without{'' if auto.trial_s is None else f'; trial steps {auto.trial_s:.3g} s'}; {measured_text}"
        )
    machine_differences = []
    if statements.code != code_digest():
        machine_differences.append("the code of the package megatron is not the run's")
    if statements.kernels != kernels_digest():
        machine_differences.append("the compiled kernels are not the run's")
    if statements.torch != torch.__version__:
        machine_differences.append(f"torch is {torch.__version__} here, and was {statements.torch}")
    for file in statements.inputs:
        contents = fingerprint(file.path)
        if contents != file.contents:
            machine_differences.append(f"{file.name}, {file.path}, is {contents} here, and was {file.contents}")
    for problem in machine_differences:
        if strict:
            raise UserError(f"{folder}: {problem}")
        yield f"warning: {problem}"


def _check_files(folder: Path, certificate: Certificate) -> str:
    manifest = read_manifest(folder)
    names = {*manifest.files, MANIFEST}
    try:
        others = sorted(set(os.listdir(folder)) - names - {CERTIFICATE})
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from error
    if others:
        raise UserError(f"{folder}: {others[0]} is not a file of the checkpoint")
    for name in sorted(names ^ set(certificate.files)):
        holder, other = ("checkpoint", "certificate") if name in names else ("certificate", "checkpoint")
        raise UserError(f"{folder}: {name} is a file of the {holder}, but not of the {other}")
    if (manifest.iteration, manifest.world_size) != (certificate.iteration, certificate.ranks):
        raise UserError(
            f"{folder}: the checkpoint is of iteration {manifest.iteration} and {manifest.world_size} ranks, the "
            f"certificate of iteration {certificate.iteration} and {certificate.ranks}"
        )
    for name, certified in certificate.files.items():
        digest = sha256()
        try:
            with open_regular(folder / name) as stream:
                while block := stream.read(READ_BYTES):
                    digest.update(block)
        except OSError as error:
            raise UserError(f"{folder / name}: {error.strerror}") from error
        if digest.hexdigest() != certified:
            raise UserError(f"{folder / name} differs: its SHA-256 is not the certificate's")
    return f"all {len(names)} ({format_bytes(sum(manifest.files.values()))}) match their SHA-256"


def _check_statements(folder: Path, certificate: Certificate) -> Iterator[str]:
    """Compare the statements with the checkpoint's common values, whose digest is already checked; yield a line for
    them, and one for a choice without a statement."""
    try:
        common = decode_plain((folder / COMMON).read_bytes())
        # Values that an earlier version did not save have their defaults on both sides.
        saved = Statements.read(common["certificate"], str(folder / COMMON)).to_dict()
        choice = common["compression_choice"]
        turned_off = choice.get("turned_off", ())
        specs_in_use = [spec for spec in choice.get("specs", ()) if point_name(spec) not in turned_off]
    except UserError:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise UserError(f"{folder / COMMON} is not what a run with --certificate writes: {error!r}") from error
    stated = certificate.statements.to_dict()
    for name, value in stated.items():
        if saved[name] != value:
            raise UserError(f"{folder / CERTIFICATE}: {name} differs from the one in {COMMON}")
    auto = certificate.statements.auto
    if auto is not None and specs_in_use != list(auto.specs):
        raise UserError(f"{folder / CERTIFICATE}: auto differs from the choice in {COMMON}")
    yield f"statements: as in {COMMON}, of iteration {certificate.iteration}"
    if auto is None and choice:
        yield f"auto: {' '.join(specs_in_use) or 'nothing'}, chosen in a run without --certificate: no evidence"


def _check_bytes(folder: Path, span: TrafficSpan) -> str:
    counted = sum(span.ledger.values())
    label = f"iterations {span.after + 1} to {span.until} of {span.ranks} ranks, {format_bytes(counted)} by the ledger"
    least = counted * (1 - BYTES_TOLERANCE)
    most = counted * (1 + BYTES_TOLERANCE) + HEADER_BYTES * 2 * (span.ranks - 1) * span.messages
    if span.connections is not None:
        label = f"{label}, {span.connections / max(counted, 1):.4f} times as many by the ranks' connections"
        if not least <= span.connections <= most:
            raise UserError(f"{folder}: bytes differ: {label}")
    if span.interfaces is None:
        return f"{label}, not compared with the interfaces: {span.reason}"
    interfaces = f"{span.interfaces / max(counted, 1):.4f} times as many by {', '.join(span.names)}"
    if span.interfaces < least or (span.interfaces > most and span.connections is None):
        raise UserError(f"{folder}: bytes differ: {label}, {interfaces}")
    return f"{label}, {interfaces}{', with other programs' if span.interfaces > most else ''}"


def _on_one_line(text: str) -> str:
    """A text whose control characters, which a certificate's texts may hold, are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 when something differs or there is no certificate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="folder that --save wrote to, or an iter_... folder in it"
    )
    parser.add_argument(
        "--strict", action="store_true", help="fail if code, kernels, torch or input files differ on this machine"
    )
    options = parser.parse_args(arguments)
    folder: Path = options.folder
    try:
        if not os.path.isdir(folder):  # unlike Path's method, false for too long names
            raise UserError(f"{folder} is not a folder; name the one that --save wrote to")
        if not (folder / CERTIFICATE).exists() and not (folder / MANIFEST).exists():
            iteration = read_tracker(folder)
            if iteration is None:
                raise UserError(f"{folder} holds no checkpoint; name the folder that --save wrote to")
            folder = checkpoint_folder(folder, iteration)
        lines = list(verify(folder, options.strict))
    except UserError as error:
        print(_on_one_line(f"verify: error: {error}"), file=sys.stderr)
        return 2
    try:
        print("\n".join(map(_on_one_line, [f"{folder}: certified", *(f"  {line}" for line in lines)])))
    except BrokenPipeError:  # as with `| head`
        sys.stdout = None
    return 0


if __name__ == "__main__":
    sys.exit(main())
