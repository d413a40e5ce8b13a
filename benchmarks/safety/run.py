"""Makes safety cards: one-page reports of a compressor's effects on loss, behavior, bytes and speed.

    make safety-card ARGS="--spec dp-grad=powersgd,rank=4"
    make safety-card ARGS="--short --spec dp-grad=cast --spec 'pp-forward=fixpoint,bits=4 pp-backward=fixpoint,bits=8'"
    sudo make safety-card ARGS="--spec dp-grad=cast --link 100mbit"       with speeds on links of that rate

A card compares a spec (or several at once, separated by spaces) with its dense twins, runs without compressors and with
the same seeds. It has paired differences of the loss with their interval and an equivalence test, a law of the gap over
sizes with its prediction of a held-out size, exact answers to canaries, flips and KL, and bytes. The short form takes
0.2 to 0.5 processor hours (measured), the full form several times as much (not measured). Finished runs are kept:
repeat the command to continue after an interruption. Writes card.md, card.json and card.svg into a folder for each
spec.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import runs
from benchmarks.lab.command import format_rate, parse_rate
from benchmarks.lab.hosts import LabError, check_permission, run_with_hosts
from benchmarks.report import device_name, header, write_record
from benchmarks.safety.card import content_of
from benchmarks.safety.link import LinkSpeed, link_run, measure_link
from benchmarks.safety.page import draw_card, page_of
from benchmarks.safety.settings import FULL, SHORT, Form, layout_of, read_card_specs
from benchmarks.safety.training import Planner, train_all
from megatron.base.errors import UserError
from megatron.config.flags import parse_args

PROGRAM = "safety-card"


def _say(text: str) -> None:
    print(f"{PROGRAM}: {text}", flush=True)


def make_planner(out: Path, text: str, form: Form) -> Planner:
    """Make the planner of a card, and check its runs before any training.

    Raises:
        UserError: for a spec that is unknown, or that the toy runs do not support.
    """
    specs = read_card_specs(text, min(size.iterations for size in form.sizes))
    planner = Planner(out, " ".join(text.split()), layout_of(specs), form)
    for run in planner.all_runs:
        try:
            parse_args(run.flags).resolve(planner.layout.ranks)
        except UserError as error:
            raise UserError(f"--spec {text}: {run.title}: {error}") from error
    return planner


def card_folder(planner: Planner) -> Path:
    return planner.out / "cards" / f"{runs.slug(planner.text)}-{planner.form.name}"


def make_card(planner: Planner, rate: int | None, has_link: bool) -> None:
    """Make a card: train what is missing, measure, and write its files.

    Raises:
        LabError: when a run on the link fails.
        SystemExit: when another run fails.
    """
    folder = card_folder(planner)
    folder.mkdir(parents=True, exist_ok=True)
    planner.prepare()
    _say(f"{planner.text}: {planner.form.name} form, {planner.layout.name}")
    train_all(planner.all_runs, _say)
    speed: LinkSpeed | None = None
    link = format_rate(rate) if has_link else None
    if has_link:
        widest = max(planner.form.sizes, key=lambda size: (size.width, size.iterations))
        run = link_run(planner.text_run(widest, 1), planner.form.link_iterations)
        speed = measure_link(run, rate, run.file(f".{link}.json"), _say)
    content = content_of(planner, header(device_name("cpu")), speed, link, _say)
    figures = {name: figure for name, figure in content.items() if name != "header"}
    write_record(folder / "card.json", content["header"], **figures)
    draw_card(content, folder / "card.svg")
    (folder / "card.md").write_text(page_of(content, "card.svg"))
    cost = content["cost"]
    _say(f"{content['loss']['verdict']}; {cost['hours']:.2f} hours; written to {folder}")


def choose_form(options: argparse.Namespace) -> Form:
    """Choose the form that the command line selects."""
    form = SHORT if options.short else FULL
    return form if options.seeds is None else replace(form, seeds=options.seeds)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; ``rate`` has bits per second of --link."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--spec",
        action="append",
        default=[],
        metavar="'SPEC ...'",
        help="specs of a card, as for --compress; repeatable",
    )
    parser.add_argument("--seeds", type=int, help=f"paired seeds ({FULL.seeds}; {SHORT.seeds} with --short)")
    parser.add_argument(
        "--short", action="store_true", help="fewer sizes and steps, and one seed outside the main size"
    )
    parser.add_argument("--link", metavar="RATE", help="measure speeds on links of this rate, such as 100mbit (root)")
    parser.add_argument("--output", type=Path, default=Path("bench_out/safety"), help="folder (bench_out/safety)")
    options = parser.parse_args(words)
    if not options.spec:
        raise UserError("give --spec, such as --spec dp-grad=powersgd,rank=4")
    if options.seeds is not None and options.seeds < 2:
        raise UserError(f"--seeds {options.seeds}: give at least 2, which an interval needs")
    options.rate = None
    if options.link is not None:
        try:
            options.rate = parse_rate(options.link)
        except LabError as error:
            raise UserError(str(error).replace("--rate", "--link")) from error
        check_permission()
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Make the cards of the command line; return the exit status."""
    try:
        options = parse(words)
        planners = [make_planner(options.output.resolve(), text, choose_form(options)) for text in options.spec]
    except (UserError, LabError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2

    def body() -> int:
        try:
            for planner in planners:
                make_card(planner, options.rate, options.link is not None)
        except KeyboardInterrupt:
            _say("interrupted; repeat the command to continue")
            return 130
        return 0

    return run_with_hosts(PROGRAM, body)


if __name__ == "__main__":
    sys.exit(main())
