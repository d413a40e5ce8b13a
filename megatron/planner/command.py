"""Predicts the cost of a training run on a cluster, and finds its fastest layout, schedule and compressors.

    python tools/plan.py --config run.yaml --cluster cluster.yaml             the run as it is, and the fastest runs
    python tools/plan.py --config run.yaml --cluster cluster.yaml --no-search the run as it is
    python tools/plan.py --config run.yaml --cluster cluster.yaml --compress auto  compressors for its layout
    python tools/launch.py --nproc-per-node 8 tools/plan.py --config run.yaml --cluster cluster.yaml --measure

--config takes a file for pretrain_gpt.py --config, such as the config.yaml that training writes beside its checkpoints.
--cluster describes the devices and links; see examples/clusters. --measure fills in the rates of this machine, with a
probe of about a minute: run alone it measures the device, under tools/launch.py also the links, with the ranks of a
node numbered consecutively. Values that it does not measure, such as the memory of a device and the size of the
cluster, stay as they are in the file; the file's comments are lost.

The prediction covers the seconds of an iteration and their breakdown, the memory of the fullest device, the bytes of
each communication point, and MFU. It runs the real model and compressors on tensors without contents, and simulates
the real pipeline schedules. The effect of a compressor on the loss is not predicted: see docs/results/loss.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.base.atomic import check_writable, write_whole
from megatron.base.errors import UserError
from megatron.base.fields import check_fields
from megatron.base.figures import check_picture
from megatron.base.value_type import ValueType
from megatron.compression.points import Point
from megatron.config.flags import ParsedRun, parse_args
from megatron.config.run import RunConfig
from megatron.distributed.process_group import LaunchEnvironment, init_process_group, pick_device, shutdown
from megatron.distributed.topology import build_topology
from megatron.planner.auto import AutoSearch
from megatron.planner.auto_report import report
from megatron.planner.candidates import candidate_specs, read_ladders
from megatron.planner.choice import NOT_PLANNED, Choice, make_choice, resolve_for_planning
from megatron.planner.cluster import (
    MAX_GPUS,
    Cluster,
    Device,
    check_sites,
    format_assumed_rates,
    format_cluster,
    read_cluster,
)
from megatron.planner.expert_imbalance import parse_imbalance
from megatron.planner.growth import describe_growth
from megatron.planner.measure import configure_measurement, fill_in_measured, measure_all
from megatron.planner.predict import Prediction, Predictor
from megatron.planner.report import compare_with_one_node, draw_prediction, explain_gain, format_breakdown, format_table
from megatron.planner.search import SPEC_SETS, add_expert_sets, search
from megatron.planner.settings import list_free_settings
from megatron.planner.suggestions import suggestions
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.vocabulary import model_entries

GPT2_VOCAB = 50257
_NON_GPT_SETTINGS = (
    *("model.bert_binary_head", "model.num_tokentypes", "data.mask_prob", "data.short_seq_prob"),
    *("model.decoder_num_layers", "model.decoder_seq_length", "parallel.pipeline_model_parallel_split_rank"),
    *("model.position_buckets", "model.max_relative_positions", "model.conv_kernel_size"),
)
"""Settings that do not apply to a GPT."""
MAX_USUAL_RATIO = 10.0
"""Ratio of measured to predicted time above which a note is printed."""


def parser() -> argparse.ArgumentParser:
    """Build the command-line parser."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--config", required=True, metavar="FILE", help="YAML configuration of the run")
    cli.add_argument("--cluster", required=True, metavar="FILE", help="description of the cluster, in YAML or JSON")
    cli.add_argument("--measure", action="store_true", help="measure this machine and write its rates to --cluster")
    cli.add_argument("--gpus", type=int, metavar="N", help="number of devices (the cluster file's)")
    cli.add_argument("--no-search", action="store_true", help="only predict the run as it is")
    cli.add_argument("--top", type=int, default=5, metavar="N", help="layouts to show, each with its best settings (5)")
    cli.add_argument(
        "--specs",
        action="append",
        metavar='"SPEC SPEC"',
        help="compressors to search together, as in --compress, instead of the default sets; may be repeated, once for "
        'each set; "" is no compression',
    )
    cli.add_argument("--compress", choices=("auto",), help="choose compressors as training does, in place of a search")
    cli.add_argument(
        "--max-loss-increase",
        metavar="PERCENT",
        help="largest increase of the validation loss that --compress auto accepts (the run's, by default 0.5)",
    )
    cli.add_argument("--vocab-size", type=int, metavar="N", help="entries of the vocabulary (the tokenizer's)")
    cli.add_argument(
        "--expert-imbalance",
        default="1",
        metavar="X|FILE",
        help="most tokens of an expert over the mean of its layer (1), or the --log-json-file of a run that logged it",
    )
    cli.add_argument("--json", metavar="FILE", help="also write the predictions to this file")
    cli.add_argument("--write", metavar="FILE", help="write the fastest run's configuration to this file")
    cli.add_argument(
        "--draw-schedule",
        metavar="FILE.svg",
        help="draw the passes of each pipeline rank over time: of the fastest run or, with --no-search, of this run",
    )
    return cli


def count_vocab_entries(config: RunConfig) -> int:
    """Count the entries of the run's vocabulary.

    Raises:
        UserError: when the tokenizer cannot be built here.
    """
    if config.tokenizer.tokenizer_type is None:
        return config.tokenizer.vocab_size or GPT2_VOCAB
    try:
        built = build_tokenizer(config.tokenizer)
    except UserError as error:
        if config.tokenizer.tokenizer_type == "GPT2BPETokenizer":
            if config.tokenizer.vocab_size is not None:
                return config.tokenizer.vocab_size
            print(f"note: {error}. GPT-2's {GPT2_VOCAB:,} entries are assumed; --vocab-size gives another number")
            return GPT2_VOCAB
        raise UserError(f"{error}; or give the number of its entries with --vocab-size") from error
    return model_entries(config.tokenizer, built)


def measure(config: RunConfig, cluster: Cluster, vocab_size: int, specs: Sequence[str], path: Path) -> Cluster | None:
    """Measure this machine; the first rank writes and returns the cluster, the other ranks return None."""
    env = LaunchEnvironment.read()
    if env.world_size == 1:
        values = measure_all(configure_measurement(config, 1), vocab_size, specs, None, 1)
    else:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        resolved = configure_measurement(config, env.world_size)
        init_process_group(env, backend, timeout_minutes=10)
        topology = build_topology(make_choice(resolved, env.world_size).mesh, pick_device(backend, env.local_rank))
        values = measure_all(resolved, vocab_size, specs, topology, env.num_local_ranks)
        shutdown()
        if env.rank:
            return None
    machine = fill_in_measured(values, cluster)
    write_whole(path, format_cluster(machine, path).encode(), "--cluster")
    outliers = [f"{k} {v:.3g}" for k, v in values.items() if k in machine.corrections and v > MAX_USUAL_RATIO]
    if outliers:
        print(f"note: measured over predicted time: {', '.join(outliers)}; is the machine busy, or the model tiny?")
    return machine


def spec_sets(options: argparse.Namespace, config: RunConfig) -> list[tuple[str, ...]]:
    """List the sets of compressors to search.

    Args:
        options: parsed command line.
        config: the user's configuration.

    Raises:
        UserError: when a set cannot be parsed, or training would reject it.
    """
    configured = tuple(config.compression.spec_texts)
    if options.specs is None:
        sets = [*add_expert_sets(config.model, SPEC_SETS), configured]
    elif options.no_search:
        raise UserError("--specs selects what is searched; leave out --specs or --no-search")
    else:
        sets = [tuple(text.split()) for text in options.specs]
    if config.islands.several:
        # Islands exchange with the run's spec, unless a set has another.
        outer = tuple(spec for spec in configured if _is_outer(spec))
        sets = [specs if any(map(_is_outer, specs)) else (*specs, *outer) for specs in sets]
    for specs in sets if options.specs is not None else ():
        try:
            searchable(config, specs)
        except UserError as error:
            raise UserError(str(error).replace("--compress", "--specs", 1)) from error
    return list(dict.fromkeys(sets))


def _is_outer(spec: str) -> bool:
    return spec.startswith(f"{Point.OUTER.value}=")


def check_planned_model(parsed: ParsedRun, location: str) -> None:
    """Check that the planner supports the model type, and that the type is known: a configuration for
    ``pretrain_bert.py`` may omit it.

    Args:
        parsed: the user's configuration.
        location: prefix of error messages.

    Raises:
        UserError: when the type is unsupported or ambiguous.
    """
    kind = parsed.config.model.model_type
    if kind in NOT_PLANNED:
        raise UserError(f"{location}: model_type {kind} is not planned: its stages differ; try its layouts")
    hints = [path.partition(".")[2] for path in _NON_GPT_SETTINGS if path in parsed.explicit]
    tokenizer = parsed.config.tokenizer.tokenizer_type or ""
    hints += [f"tokenizer_type {tokenizer}"] if tokenizer.startswith("BertWordPiece") else []
    if hints and "model.model_type" not in parsed.explicit:
        raise UserError(
            f"{location}: {hints[0]} looks like another model than a GPT; write model_type: bert below model:, or "
            "model_type: gpt if it is one"
        )


def searchable(config: RunConfig, specs: Sequence[str] = ()) -> RunConfig:
    """Resolve the model and the batch of a run with compressors, ignoring the layout.

    Raises:
        UserError: when the configuration is invalid, or training would reject the compressors on every layout.
    """
    islands = config.islands.islands
    return resolve_for_planning(Choice(1, 1, 1, specs=tuple(specs), islands=islands).configure(config), islands)


def print_predictions(
    predictor: Predictor,
    as_it_is: bool,
    sets: Sequence[tuple[str, ...]],
    config: RunConfig,
    options: argparse.Namespace,
) -> tuple[list[Prediction], Prediction]:
    """Print predictions: the configured run, if it is possible, followed by the fastest runs.

    Args:
        predictor: predictor of the model.
        as_it_is: whether the configured layout fits the cluster.
        sets: sets of compressors to search.
        config: the user's configuration.
        options: parsed command line.

    Returns:
        The predictions, and that of the fastest run; without a search, of the configured run.
    """
    memory = predictor.cluster.device.memory_gib
    predictions: list[Prediction] = []
    if as_it_is:
        baseline = predictor.predict(make_choice(predictor.config, predictor.cluster.gpus))
        predictions.append(baseline)
        print(f"the run as it is, on {predictor.cluster.name}:\n{format_table([baseline], memory)}")
        print(format_breakdown(baseline, predictor.cluster))
        if baseline.memory_bytes > memory * 2**30:
            print(f"  it does not fit: {baseline.memory_bytes / 2**30:.1f} GiB of {memory:.0f}")
        if growth := describe_growth(predictor, baseline.choice):
            print(f"  {growth}")
    if config.compression.is_auto:
        budget = config.compression.max_loss_increase
        ladders = read_ladders(predictor.config, baseline.choice, predictor.cluster)
        free_settings = list_free_settings(predictor.config, baseline.choice, ())
        auto_choice = AutoSearch(predictor, baseline.choice, ladders, budget, memory, free_settings).choose()
        chosen = auto_choice.chosen.prediction
        text = report(auto_choice, budget, suggestions(predictor, chosen, free_settings))
        print(f"\n{text}\n\n{format_table([chosen], memory)}")
        print(format_breakdown(chosen, predictor.cluster, warns_of_loss=False))
        print(compare_with_one_node(predictor, chosen), end="")
        _write_configuration(options, chosen, config)
        return [*predictions, chosen], chosen
    if options.no_search:
        return predictions, predictions[0]
    start = time.perf_counter()
    result = search(predictor, sets, options.top)
    spent = time.perf_counter() - start
    print(
        f"\nthe fastest of each of the fastest layouts, of {result.considered} choices ({result.predicted} predicted "
        f"in {spent:.1f} s, {result.too_large} too large, the others ruled out by their lower bounds):"
    )
    print(f"{format_table(result.best, memory)}\n")
    print(f"the fastest:\n{format_breakdown(result.best[0], predictor.cluster, config)}")
    if len(result.best) > 1:
        print(f"the runner-up is {explain_gain(result.best[0], result.best[1])}")
    print(compare_with_one_node(predictor, result.best[0]), end="")
    _write_configuration(options, result.best[0], config)
    return [*predictions, *result.best], result.best[0]


def _write_configuration(options: argparse.Namespace, best: Prediction, config: RunConfig) -> None:
    if options.write:
        write_whole(options.write, best.choice.configure(config).to_yaml().encode(), "--write")
        print(f"the fastest run's configuration is written to {options.write}")


def run(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        UserError: when the command line or the configuration is invalid.
    """
    path = Path(options.cluster)
    for flag, name in (("--json", options.json), ("--write", options.write)):
        if name is not None:
            check_writable(name, flag)
    if options.draw_schedule is not None:
        check_picture(options.draw_schedule, "--draw-schedule")
    if options.write and options.no_search:
        raise UserError("--write writes what the search finds; leave out --no-search")
    parsed = parse_args(["--config", options.config])
    check_planned_model(parsed, f"--config {options.config}")
    config = _apply_auto_flags(parsed.config, options)
    if options.vocab_size and config.tokenizer.tokenizer_type is None:
        tokenizer = dataclasses.replace(config.tokenizer, vocab_size=options.vocab_size)
        config = dataclasses.replace(config, tokenizer=tokenizer)
    if path.exists() or not options.measure:
        cluster = read_cluster(path)
    else:  # before measuring, only the number of ranks and their memory are known
        env = LaunchEnvironment.read()
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else 4.0
        cluster = Cluster(gpus=env.world_size, gpus_per_node=env.num_local_ranks, device=Device(memory_gib=memory))
    gpus = options.gpus or cluster.gpus
    if gpus % config.islands.islands:
        raise UserError(f"--islands {config.islands.islands} does not divide the {gpus} devices; use a multiple")
    planned = dataclasses.replace(cluster, gpus=gpus)
    check_sites(planned)
    try:
        base, refusal = resolve_for_planning(config, gpus), None
    except UserError as error:
        if options.no_search or config.compression.is_auto or config.training.global_batch_size is None:
            raise
        base, refusal = searchable(config), error
    sets, imbalance = spec_sets(options, config), parse_imbalance(options.expert_imbalance, base.model)
    vocab_size = options.vocab_size or count_vocab_entries(config)
    if options.measure:
        check_writable(options.cluster, "--cluster")
        specs = list(config.compression.spec_texts)
        if config.compression.is_auto:
            specs += candidate_specs(read_ladders(base, make_choice(base, gpus), planned))
        measured = measure(config, cluster, vocab_size, specs, path)
        if measured is None:
            return
        print(f"measured; written to {path}\n")
        planned = dataclasses.replace(measured, gpus=gpus)
    else:
        print(format_assumed_rates(path, planned), end="")
    if refusal is not None:
        print(f"the run as it is cannot be planned on {gpus} devices: {refusal}")
    predictor = Predictor(base, planned, vocab_size, imbalance)
    predictions, best = print_predictions(predictor, refusal is None, sets, config, options)
    if options.json:
        text = json.dumps([dataclasses.asdict(prediction) for prediction in predictions], indent=1)
        write_whole(options.json, text.encode(), "--json")
    if options.draw_schedule:
        draw_prediction(predictor, best, Path(options.draw_schedule))
        print(f"the schedule is drawn in {options.draw_schedule}")


def _apply_auto_flags(config: RunConfig, options: argparse.Namespace) -> RunConfig:
    """Apply ``--compress auto`` and ``--max-loss-increase`` of the command line.

    Raises:
        UserError: when they contradict other flags.
    """
    compression = config.compression
    if options.compress is not None:
        compression = dataclasses.replace(compression, compress=[options.compress, *compression.spec_texts])
    if options.max_loss_increase is not None:
        if not compression.is_auto:
            raise UserError("--max-loss-increase: give --compress auto, too")
        percent = ValueType(element=float, percent=True).from_text(options.max_loss_increase, "--max-loss-increase")
        compression = dataclasses.replace(compression, max_loss_increase=percent)
        check_fields("compression", compression)
    if compression.is_auto and (options.specs is not None or options.no_search):
        raise UserError("--compress auto chooses for the run's layout; leave out --specs and --no-search")
    if compression.is_auto and config.islands.several:
        raise UserError("--compress auto: not for islands; name the specs")
    return dataclasses.replace(config, compression=compression)


def main(arguments: Sequence[str] | None = None) -> int:
    cli = parser()
    options = cli.parse_args(arguments)
    for name in ("gpus", "top", "vocab_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            cli.error(f"--{name.replace('_', '-')} {value}: give at least 1")
    if options.gpus is not None and options.gpus > MAX_GPUS:
        cli.error(f"--gpus {options.gpus}: give at most {MAX_GPUS:,}")
    try:
        run(options)
        sys.stdout.flush()
    except UserError as error:
        print(f"plan: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has closed the pipe (| head); flushing the remaining buffer must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        print(f"plan: error: the model is too large to plan ({error})", file=sys.stderr)
        return 2
    return 0
