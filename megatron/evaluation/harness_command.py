"""Evaluates a checkpoint on tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatron.base.atomic import check_writable, write_whole
from megatron.base.errors import UserError, first_line
from megatron.base.option import derived, option, required
from megatron.convert.command import convert, parse
from megatron.data.interrupt import interrupt_on_signals
from megatron.distributed.agreement import run_together
from megatron.inference.flags import ModelFlags, check_layout, open_model, parse_flags
from megatron.inference.jobs import Leader, follow
from megatron.training.program import Ranks, run_program

DESCRIPTION = """Evaluates a checkpoint on tasks of lm-evaluation-harness.

    pip install -e '.[evaluation]'
    python tools/evaluate_lm.py --load checkpoints --tasks lambada_openai hellaswag
    python tools/evaluate_lm.py --load checkpoints --tasks my_task --include-path folder_of_my_task_yaml
    python tools/launch.py --nproc-per-node 2 tools/evaluate_lm.py \\
        --tensor-model-parallel-size 2 --load checkpoints --tasks ...

--via adapter (the default) runs the checkpoint directly, on any layout; --via hf exports it to a Hugging Face folder
for the harness's own model, which needs a GPT-2 or Llama architecture and a single process. Both give the same
results, up to rounding. The harness downloads the data of its tasks; --include-path adds tasks with your own data."""


@dataclass(frozen=True, kw_only=True)
class EvaluationFlags:
    """Tasks, and options of the evaluation."""

    tasks: list[str] = required(  # noqa: RUF009
        "Names of the tasks.", metavar="TASK"
    )
    include_path: str | None = derived("none", "Folder of YAML files with additional tasks.", metavar="DIR")
    num_fewshot: int | None = derived("each task's", "Examples before each question.", minimum=0)
    limit: int | None = derived("all", "Number of questions of each task.", unit="questions", minimum=1)
    micro_batch_size: int = option(8, "Texts per forward pass.", unit="texts", minimum=1)
    via: Literal["adapter", "hf"] = option("adapter", "Run the checkpoint directly, or export it first.")
    bootstrap_iters: int = option(
        1000,
        "Number of bootstrap samples for standard errors that have no formula; 0: no standard errors.",
        unit="draws",
        minimum=0,
        maximum=1_000_000,
    )
    output: str | None = derived("none", "JSON file for all figures.", metavar="FILE")


def run(model: Any, flags: EvaluationFlags) -> dict[str, Any]:
    """Run the harness.

    Args:
        model: a harness model.
        flags: flags that name the tasks.

    Raises:
        UserError: when the harness does not know a task, or the task's data is unavailable.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from megatron.evaluation.lm_eval_rules import ContinuationRules

    manager = TaskManager(include_path=flags.include_path)
    unknown = sorted(set(flags.tasks) - set(manager.all_tasks))
    if unknown:
        raise UserError(f"--tasks {unknown[0]}: the harness has no such task; --include-path adds a folder of tasks")
    method = "load" if hasattr(manager, "load") else "load_task_or_group"  # the name in older versions
    setattr(manager, method, partial(_load_tasks, getattr(manager, method)))
    # Processes forked for bootstrapping would share this process's threads, device and sockets to other ranks.
    os.environ["DISABLE_MULTIPROC"] = "1"
    results = simple_evaluate(
        model=model,
        tasks=list(flags.tasks),
        num_fewshot=flags.num_fewshot,
        limit=flags.limit,
        batch_size=flags.micro_batch_size,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=flags.bootstrap_iters,
    )
    assert results is not None
    return {**results, "contexts": vars(model.contexts)} if isinstance(model, ContinuationRules) else dict(results)


def _load_tasks(load: Callable[[list[str]], Any], tasks: list[str]) -> Any:
    """Load tasks for the harness; turn errors of their data into UserError.

    Raises:
        UserError: when the data of a task is unavailable; the message names the task.
    """
    try:
        return load(tasks)
    except Exception as error:  # file, format and network errors differ between the underlying libraries
        for task in tasks if len(tasks) > 1 else ():
            _load_tasks(load, [task])
        raise UserError(f"--tasks {' '.join(tasks)}: its data cannot be loaded ({first_line(error)})") from error


def report(results: dict[str, Any] | UserError, flags: EvaluationFlags) -> None:
    """Print the harness's table, and write the results.

    Raises:
        UserError: when ``results`` is a UserError, or the file cannot be written.
    """
    from lm_eval.utils import make_table

    if isinstance(results, UserError):
        raise results
    print(make_table(results), flush=True)
    contexts = results["contexts"]
    if contexts["cut"]:
        print(
            f"note: the contexts of {contexts['cut']:,} of {contexts['requests']:,} requests are longer than the model "
            f"reads ({contexts['window']:,} tokens): their first tokens were dropped, {contexts['tokens_cut']:,} in "
            f"total, at most {contexts['most_tokens_cut']:,} per context",
            flush=True,
        )
    if flags.output:
        names = ("results", "versions", "n-shot", "n-samples", "contexts")
        figures = {name: results[name] for name in names if name in results}
        write_whole(flags.output, json.dumps(figures, indent=1, default=str).encode(), "--output")


def via_hf(load: str, iteration: int | None, flags: EvaluationFlags) -> dict[str, Any]:
    """Export the checkpoint to a temporary Hugging Face folder and evaluate the export.

    Raises:
        UserError: when the model has no Hugging Face architecture, or ``run`` raises it.
    """
    with tempfile.TemporaryDirectory(prefix="evaluate-lm-") as folder:
        step = ["--iteration", str(iteration)] if iteration is not None else []
        with interrupt_on_signals():
            convert(parse(["--load", load, "--save", f"{folder}/hf", "--to", "hf", *step]))
        from megatron.evaluation.lm_eval_rules import ExportedLM

        return run(ExportedLM(f"{folder}/hf", flags.micro_batch_size), flags)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 on success, or 2 after printing a one-line error."""

    def body(ranks: Ranks) -> None:
        arguments = sys.argv[1:] if argv is None else argv
        parsed = parse_flags(arguments, {"evaluation": EvaluationFlags}, "evaluate_lm.py", DESCRIPTION)
        model_flags: ModelFlags = parsed.sections["model"]
        flags: EvaluationFlags = parsed.sections["evaluation"]
        try:
            import lm_eval  # noqa: F401
        except ImportError as error:
            raise UserError(f"{error.name} is missing: pip install -e '.[evaluation]'") from error
        if flags.include_path and not Path(flags.include_path).is_dir():
            raise UserError(f"--include-path {flags.include_path}: there is no such folder")
        if flags.output:
            check_writable(flags.output, "--output")
        layout = check_layout(model_flags, ranks.env, replicas=False)
        if flags.via == "hf":
            if ranks.env.world_size > 1:
                raise UserError("--via hf runs on one process; leave out the launcher or --via")
            if any(name.startswith("tokenizer.") for name in parsed.explicit):
                raise UserError("--via hf exports the run's own tokenizer; leave out the tokenizer flags or --via")
            report(via_hf(model_flags.load, model_flags.ckpt_step, flags), flags)
            return
        ranks.join(model_flags.backend, model_flags.distributed_timeout_minutes, parsed.sections, parsed.notes)
        model = open_model(model_flags, parsed.sections["tokenizer"], layout, ranks.env)
        group = model.topology.control.pg
        if not model.is_sampling_rank:
            follow(model)
            run_together(group, lambda: None)
            return
        from megatron.evaluation.lm_eval_adapter import CheckpointLM

        if ranks.env.world_size > 1:
            # The harness runs on this rank only, and returns results only to the first process of a machine.
            os.environ["LOCAL_RANK"] = "0"
        outcome: dict[str, Any] | UserError
        with Leader(model, 60 * model_flags.distributed_timeout_minutes) as leader:
            try:
                outcome = run(CheckpointLM(leader, flags.micro_batch_size), flags)
            except UserError as error:
                outcome = error  # raised on all ranks, after the other ranks have left ``follow``
        run_together(group, partial(report, outcome, flags))

    return run_program(body)
