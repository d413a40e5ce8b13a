"""Translation of AQ-SGD runner flags that describe the run; legacy.py translates its compressor flags."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.base.errors import UserError
from megatron.base.option import derived, option
from megatron.base.user_text import Note
from megatron.config.translate.rules import Dialect, ExplicitValues, SectionValues

_TASKS = ("wikitext", "arxiv21")


@dataclass(frozen=True, kw_only=True)
class AqsgdConfig:
    """Flags of AQ-SGD's runners, translated. With --pipeline-group-size, sizes count as they do there."""

    pipeline_group_size: int | None = derived(
        "unused",
        "Same as --pipeline-model-parallel-size; --num-layers then counts the layers of one stage, and --batch-size "
        "the samples of one replica's step.",
        unit="stages",
        minimum=1,
    )
    data_group_size: int | None = derived("1", "Replicas that --batch-size stands for.", unit="replicas", minimum=1)
    batch_size: int | None = derived(
        "unused",
        "Old name of --micro-batch-size; with --pipeline-group-size, samples of a replica's step.",
        unit="samples",
        minimum=1,
    )
    model_name: str | None = derived("unused", "Same as --load FOLDER --finetune.", metavar="FOLDER")
    load_pretrained_model: bool | None = derived("on", "Load the weights of --model-name; false: do not.")
    tokenizer_name: str | None = derived(
        "unused", "Same as --tokenizer-type HFTokenizer --tokenizer-model PATH.", metavar="PATH"
    )
    task_name: str | None = derived("unused", "wikitext or arxiv21: a language model of the text in --data-path.")
    do_evaluation: bool | None = derived("on", "Evaluate; false is the same as --eval-iters 0.")
    gradient_accumulate_step: int = option(1, "Only 1 is accepted; more repeated the same batch in AQ-SGD.", minimum=1)


def _translate(theirs: SectionValues, explicit: ExplicitValues, note: Note) -> None:
    """Translate the flags. Raises UserError for unavailable or contradictory settings."""
    if theirs.task_name is not None:
        if theirs.task_name not in _TASKS:
            raise UserError(f"--task-name {theirs.task_name}: only language models are trained; use {_TASKS[0]}")
        note(f"--task-name {theirs.task_name}: no effect, the text is that of --data-path")
    if theirs.gradient_accumulate_step != 1:
        raise UserError("--gradient-accumulate-step repeats the same batch; leave it out and raise --batch-size")
    stages, batch, replicas = theirs.pipeline_group_size, theirs.batch_size, theirs.data_group_size
    if stages is None:
        if replicas is not None:
            note("--data-group-size: no effect without --pipeline-group-size; replicas follow from the processes")
        if batch is not None:
            theirs.set_field("batch_size", "training.micro_batch_size", batch, f"--batch-size {batch}")
            note(f"--batch-size is an old name: taken as --micro-batch-size {batch}")
    else:
        flag = f"--pipeline-group-size {stages}"
        theirs.set_field("pipeline_group_size", "parallel.pipeline_model_parallel_size", stages, flag)
        layers = explicit.get("model.num_layers")
        if layers is not None:
            total = layers * stages
            explicit["model.num_layers"] = total
            note(f"{flag}: --num-layers {layers} counts one stage, as in AQ-SGD; the model has {total} layers")
        if batch is not None:
            global_batch = batch * (replicas or 1)
            theirs.set_field("batch_size", "training.global_batch_size", global_batch, f"--batch-size {batch}")
            note(
                f"{flag}: --batch-size {batch} counts one replica's step, as in AQ-SGD; --global-batch-size is "
                f"{global_batch}"
            )
        elif replicas is not None:
            note("--data-group-size: no effect without --batch-size; replicas follow from the processes")
    name, tokenizer = theirs.model_name, theirs.tokenizer_name
    if name is None:
        if theirs.load_pretrained_model is not None:
            note("--load-pretrained-model: no effect without --model-name")
    elif theirs.load_pretrained_model is False:
        note("--model-name: no effect with --load-pretrained-model false")
    elif "checkpoint.load" in explicit:
        note("--model-name: no effect with --load")
    else:
        explicit |= {"checkpoint.load": name, "checkpoint.finetune": True}
        note(
            f"--model-name {name} means --load {name} --finetune; tools/ckpt_convert.py makes that folder from a "
            "Hugging Face one"
        )
    if tokenizer is not None and any(path.startswith("tokenizer.") for path in explicit):
        note("--tokenizer-name: no effect with another tokenizer's flags")
    elif tokenizer is not None:
        explicit |= {"tokenizer.tokenizer_type": "HFTokenizer", "tokenizer.tokenizer_model": tokenizer}
        note(f"--tokenizer-name {tokenizer} means --tokenizer-type HFTokenizer --tokenizer-model {tokenizer}")
    if theirs.do_evaluation is False:
        theirs.set_field("do_evaluation", "validation.eval_iters", 0, "--do-evaluation false")


AQSGD = Dialect(section="aqsgd", config=AqsgdConfig, translate=_translate)
