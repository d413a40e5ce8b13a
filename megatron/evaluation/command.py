"""Tasks: fine-tuning and its evaluation, and zero-shot tasks, on one process or, under tools/launch.py, on several."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from megatron.base.documents import read_yaml
from megatron.base.errors import UserError
from megatron.base.option import derived, option, required
from megatron.base.user_text import flag_of, spell
from megatron.config.tasks import TASKS, task_name
from megatron.evaluation import continuation, finetune, lambada, wikitext
from megatron.inference.flags import ModelFlags, check_layout, open_model, parse_flags
from megatron.inference.model import LoadedModel
from megatron.training.program import Ranks, run_program

DESCRIPTION = """Evaluates a checkpoint of any layout on a task, on one process or, under tools/launch.py, on several.

    python tasks/main.py --task WIKITEXT103 --valid-data wiki.test.tokens --load DIR
    python tasks/main.py --task LAMBADA --valid-data lambada_test.jsonl --strict-lambada --load DIR
    python tools/launch.py --nproc-per-node 4 tasks/main.py --tensor-model-parallel-size 2 ... --load DIR

WIKITEXT103 takes any text and prints the mean loss of its tokens, the perplexity, and the perplexity per original word
(if the path contains "wiki", WikiText's spaces around punctuation are removed before tokenization). LAMBADA takes JSON
lines with a field text and predicts its last word. CONTINUATION takes the same and prints how often greedy decoding
reproduces the text, and how often the true continuation is likelier than continuations from other positions.
Processes beyond those that the model is split over hold replicas, which share the work.

Other tasks fine-tune a model, or evaluate a fine-tuned model; --task MNLI --help shows their flags:

    python tasks/main.py --task MNLI --train-data train.tsv --valid-data dev_matched.tsv --epochs 3 ...

These tasks are %s."""


ZeroShotTask = Literal["WIKITEXT103", "LAMBADA", "CONTINUATION"]
ZERO_SHOT: tuple[str, ...] = get_args(ZeroShotTask)


@dataclass(frozen=True, kw_only=True)
class ZeroShotFlags:
    """The task and its data."""

    task: ZeroShotTask = required("Name of the task.")  # noqa: RUF009
    valid_data: list[str] = required(  # noqa: RUF009
        "File of the text, or of the JSON lines.", metavar="FILE", count=1
    )
    overlapping_eval: int = option(
        32,
        "WIKITEXT103: new tokens that each window after the first predicts; 0: windows do not overlap, which is faster "
        "but overestimates the loss.",
        unit="tokens",
        minimum=0,
    )
    strict_lambada: bool = option(False, "LAMBADA: predict the whole last word, not only its last token.")
    samples: int = option(2000, "CONTINUATION: maximum number of positions.", unit="positions", minimum=1)
    prompt_tokens: int = option(32, "CONTINUATION: tokens before the continuation.", unit="tokens", minimum=1)
    continuation_tokens: int = option(8, "CONTINUATION: tokens to predict.", unit="tokens", minimum=1)
    choices: int = option(
        4, "CONTINUATION: number of continuations to rank, including the true one.", minimum=2, maximum=64
    )
    micro_batch_size: int = option(8, "Windows per forward pass.", unit="windows", minimum=1)
    epochs: int | None = derived("none", "Only for fine-tuning.", minimum=0)
    train_data: list[str] | None = derived(  # noqa: RUF009
        "none", "Only for fine-tuning.", metavar="FILE"
    )
    pretrained_checkpoint: str | None = derived("none", "Only for fine-tuning.", metavar="DIR")
    keep_last: bool = option(False, "Keep the last, smaller batch: always on here.", no_effect="it is always kept")


def prepare_evaluation(flags: ZeroShotFlags) -> Callable[[LoadedModel], str]:
    """Validate the flags and read the data, before the process group is created.

    Returns:
        A function that evaluates the task and returns its result line, or raises UserError for unsuitable data.

    Raises:
        UserError: when a flag does not apply to the task, or the data cannot be read.
    """
    for name in ("epochs", "train_data", "pretrained_checkpoint"):
        if getattr(flags, name):
            raise UserError(
                f"{flag_of(name)}: {flags.task} is a zero-shot task; train on texts with pretrain_gpt.py "
                "--finetune, or leave it out"
            )
    (path,), batch = flags.valid_data, flags.micro_batch_size
    if flags.task == "LAMBADA":
        texts = lambada.read_texts(path)
        return lambda model: lambada.evaluate(model, texts, path, flags.strict_lambada, batch)
    if flags.task == "CONTINUATION":
        if flags.samples < flags.choices:
            raise UserError(
                f"--samples {flags.samples} is less than --choices {flags.choices}: wrong continuations come from the "
                "other positions; give more samples or fewer choices"
            )
        documents = lambada.read_texts(path)
        options = continuation.QuestionOptions(
            flags.samples, flags.prompt_tokens, flags.continuation_tokens, flags.choices
        )
        return lambda model: continuation.evaluate(model, documents, path, options, batch)
    text, words = wikitext.read_text(path)
    return lambda model: wikitext.evaluate(model, text, words, path, flags.overlapping_eval, batch)


def requested_task(words: Sequence[str]) -> str:
    """Name of the requested task, from the last --task in any spelling, else from the --config file; empty if there is
    none."""
    task, path = _flag_value("task", words), _flag_value("config", words)
    if task or not path:
        return task
    try:
        content: Any = read_yaml(path)
    except UserError:
        return ""  # the flag parser reports the error
    for _ in range(2):  # the task is in a section of the same name, or at the top level
        content = next((value for key, value in content.items() if spell(str(key)) == "task"), "")
        if not isinstance(content, dict):
            break
    return content if isinstance(content, str) else ""


def _flag_value(flag: str, words: Sequence[str]) -> str:
    """Value of the last occurrence of a flag; empty if it is missing."""
    last_value = ""
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.startswith("--") and spell(name) == flag:
            last_value = value if equals else "".join(words[number + 1 : number + 2])
    return last_value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 on success, or 2 after printing a one-line error."""
    words = list(sys.argv[1:] if argv is None else argv)
    task = requested_task(words)
    if task_name(task) in TASKS:
        return finetune.main(words)

    def body(ranks: Ranks) -> None:
        if task and task.upper() not in ZERO_SHOT:
            raise UserError(f"--task {task}: choose from {', '.join((*TASKS, *ZERO_SHOT))}")
        about = DESCRIPTION % ", ".join(TASKS)
        parsed = parse_flags(words, {"task": ZeroShotFlags}, "main.py", about)
        model_flags: ModelFlags = parsed.sections["model"]
        flags: ZeroShotFlags = parsed.sections["task"]
        evaluate = prepare_evaluation(flags)
        layout = check_layout(model_flags, ranks.env, replicas=True)
        ranks.join(model_flags.backend, model_flags.distributed_timeout_minutes, parsed.sections, parsed.notes)
        model = open_model(model_flags, parsed.sections["tokenizer"], layout, ranks.env)
        line = evaluate(model)
        if model.is_sampling_rank:
            rule = "-" * (len(line) + 1)
            print(f"{rule}\n{line}\n{rule}", flush=True)

    return run_program(body)
