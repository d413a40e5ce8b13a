"""Command lines of the scripts of other systems, word for word.

Paths are filled in, and shell variables replaced by their values.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Script:
    """A command line and its number of processes.

    Args:
        flags: words of the command line.
        world_size: number of processes.
        deepspeed: content of the file of --deepspeed_config DS.
    """

    flags: str
    world_size: int
    deepspeed: str = ""


_GPT2 = "--vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt"
_OPTIMUS_SIZES = {
    "335M": "--num-layers 24 --hidden-size 1024 --num-attention-heads 16",
    "2.5B": "--num-layers 52 --hidden-size 1920 --num-attention-heads 24",
    "8.3B": "--num-layers 72 --hidden-size 3072 --num-attention-heads 24",
}
_CB = "--inter_grad_comp --inter_grad_comp_rank 16 --inter_grad_comp_epilogue_only"
_SC = "--grad_comp --grad_comp_rank 128 --grad_comp_warm_up 0.0 --selective_grad_comp --selective_grad_comp_way 3"
_OPTIMUS_SCHEMES = {
    "Baseline": "",
    "CB": f"{_CB} --use_error_feedback",
    "CB-NON-LEP": _CB,
    "CB-FE": f"{_CB} --emb_comm_opt --use_error_feedback",
    "CB-FE-SC": f"{_SC} {_CB} --emb_comm_opt --use_error_feedback",
    "Orth": "--inter_grad_comp --inter_grad_comp_rank 16 --use_error_feedback --check_orth_error_acti",
    # Blanks follow the backslash at the end of the line, so it is a word.
    "CB-335M": "--inter_grad_comp \\ --inter_grad_comp_rank 16 --inter_grad_comp_epilogue_only --use_error_feedback",
    "README": "--inter_grad_comp --inter_grad_comp_rank 12 --inter_grad_comp_epilogue_only --use_error_feedback "
    "--emb_comm_opt --grad_comp --grad_comp_rank 128 --grad_comp_warm_up 0.1 --selective_grad_comp "
    "--selective_grad_comp_way 2",
}


def _optimus(size: str, scheme: str, iterations: int, tp: int = 8, pp: int = 4, batch: int = 512) -> str:
    return (
        f"{_OPTIMUS_SIZES[size]} --micro-batch-size 8 --global-batch-size {batch} --seq-length 1024 "
        f"--max-position-embeddings 1024 --train-iters {iterations} --lr-decay-iters 320000 --save ckpt_1 "
        f"--load ckpt_1 --data-path my-gpt2_text_document {_GPT2} --data-impl mmap --split 949,50,1 "
        "--distributed-backend nccl --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 "
        "--clip-grad 1.0 --lr-warmup-fraction .01 --activations-checkpoint-method uniform --save-interval 100 "
        f"--eval-interval 100 --eval-iters 10 --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} "
        f"--experiment_name GPT2-{size}-{scheme} --DDP-impl local {_OPTIMUS_SCHEMES[scheme]} --log-interval 1"
    )


def _optimus_scripts() -> dict[str, Script]:
    four = ("Baseline", "CB", "CB-FE", "CB-FE-SC")
    scripts = {}
    for size in _OPTIMUS_SIZES:
        for scheme in four:
            scheme_flags = "CB-335M" if (size, scheme) == ("335M", "CB") else scheme
            scripts[f"optimus-cc fig10 {size} {scheme}"] = Script(_optimus(size, scheme, 10), 64)
            scripts[f"optimus-cc tbl2 {size} {scheme}"] = Script(_optimus(size, scheme_flags, 230000), 64)
    for scheme in four:
        flags = _optimus("335M", scheme, 10, tp=2, pp=2)
        scripts[f"optimus-cc functionality_check {scheme}"] = Script(flags, 8)
    for size in ("2.5B", "8.3B"):
        for scheme in ("Baseline", "CB", "CB-NON-LEP"):
            scripts[f"optimus-cc fig12 {size} {scheme}"] = Script(_optimus(size, scheme, 10), 64)
    scripts["optimus-cc tbl4 2.5B CB-NON-LEP"] = Script(_optimus("2.5B", "CB-NON-LEP", 230000), 64)
    scripts["optimus-cc fig11 8.3B"] = Script(_optimus("8.3B", "Orth", 1000), 64)
    plain = _optimus("335M", "Baseline", 3000, tp=1, pp=1, batch=1024) + " --no-masked-softmax-fusion"
    scripts["optimus-cc lsf example"] = Script(plain, 8)
    scripts["optimus-cc readme"] = Script(_optimus("2.5B", "README", 230000), 64)
    return scripts


def _radius(hidden: int, heads: int, iterations: int, decay: int, more_flags: str) -> str:
    return (
        f"--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 24 --hidden-size {hidden} "
        f"--num-attention-heads {heads} --micro-batch-size 8 --global-batch-size 512 --seq-length 1024 "
        f"--max-position-embeddings 1024 --train-iters {iterations} --lr-decay-iters {decay} --save ckpt_save "
        "--load ckpt_load --data-path d_text_document --vocab-file ./tools/gpt2-vocab.json "
        "--merge-file ./tools/gpt2-merges.json --data-impl mmap --split 949,50,1 --distributed-backend nccl "
        "--lr 0.00015 --lr-decay-style cosine --weight-decay 1e-2 --clip-grad 1.0 "
        "--activations-checkpoint-method uniform --log-interval 1 --eval-interval 100 --eval-iters 10 "
        f"--accumulate-allreduce-grads-in-fp32 --bf16 {more_flags}"
    )


def _stable(kind: str, density: float, interval: int, threshold: int, reach: str = "") -> str:
    return (
        f"--lr-warmup-fraction .01 --min-lr 1.0e-6 --save-interval 10000 --use-checkpoint-lr-scheduler "
        f"--experiment_name e --log_txt_file log.txt --grad_comp --grad_comp_type {kind} --density {density} "
        f"--stable_topk_interval {interval} --stable_topk_threshold {threshold} --stable_topk_warmup_method Dense "
        f"{reach} --move_grad_clip_to_reducer"
    )


_RANGE = "StableTopKReducerWithRangeBucketsEFCorrectionResIsGrad"
_SMALL, _LARGE = (1024, 16, 500000, 320000), (2560, 32, 300000, 192000)
_PLAIN = "--min-lr 1.0e-5 --lr-warmup-fraction .01 --experiment_name GPT_Baseline"
_PLOT = "--min-lr 1.0e-5 --lr-warmup-fraction .01 --save-interval 100000 --experiment_name GPT_345M_Baseline_plot"

RADIUS: dict[str, Script] = {
    "radius 355M dense": Script(
        _radius(*_SMALL, f"{_PLAIN} --save-interval 5000 --use-checkpoint-lr-scheduler --log_txt_file log.txt"), 4
    ),
    "radius 2.0B dense": Script(
        _radius(*_LARGE, f"{_PLAIN} --save-interval 2000 --use-checkpoint-lr-scheduler --log_txt_file log.txt"), 64
    ),
    "radius 355M": Script(_radius(*_SMALL, _stable(_RANGE, 0.3, 500, 80000, "--stable_topk_range 0")), 64),
    "radius 2.0B": Script(_radius(*_LARGE, _stable(_RANGE, 0.9, 200, 100, "--stable_topk_range 0")), 4),
    "radius 355M per layer": Script(_radius(*_SMALL, _stable(f"{_RANGE}PerLayer", 0.1, 100, 100)), 64),
    "radius 2.0B per layer": Script(_radius(*_LARGE, _stable(f"{_RANGE}PerLayer", 0.9, 200, 100)), 64),
    "radius 355M classic top-k": Script(
        _radius(
            *_SMALL,
            "--min-lr 1.0e-5 --lr-warmup-fraction .001 --save-interval 5000 --use-checkpoint-lr-scheduler "
            "--experiment_name e --grad_comp --grad_comp_type TopKReducerEFCorrectionResIsGradWarmup --density 0.01 "
            "--stable_topk_threshold 80000 --stable_topk_warmup_method Dense "
            "--stable_topk_density_warmup_steps 1000 --log_txt_file log.txt --move_grad_clip_to_reducer",
        ),
        16,
    ),
    "radius plot_grad_density": Script(
        _radius(
            *_SMALL,
            f"{_PLOT} --plot_gradients_density --plot_gradients_density_interval 500 "
            "--plot_gradients_density_output_dir plots --plot_gradients_density_type histplot",
        ),
        8,
    ),
    "radius plot_grad_distribution": Script(
        _radius(
            *_SMALL,
            f"{_PLOT} --log_gradients --log_gradients_interval 100 --log_gradients_output_dir gradients",
        ),
        16,
    ),
}


def _edgc(layers: int, hidden: int, heads: int, batch: int, tp: int) -> str:
    return (
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size 4 --num-layers {layers} "
        f"--hidden-size {hidden} --num-attention-heads {heads} --micro-batch-size 4 --global-batch-size {batch} "
        "--seq-length 1024 --max-position-embeddings 1024 --train-iters 230000 --lr-decay-iters 320000 --save c "
        "--load c --collect-log-path logs --tensorboard-dir t --data-path my-gpt2_text_document "
        f"{_GPT2} --data-impl mmap --split 949,50,1 --distributed-backend nccl --lr 0.00015 --lr-decay-style cosine "
        "--override-opt_param-scheduler --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 "
        "--lr-warmup-fraction .01 --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 "
        "--grad_comp --use_error_feedback --DDP-impl local"
    )


EDGC: dict[str, Script] = {
    "edgc 345M": Script(_edgc(24, 1024, 16, 64, 2), 16),
    "edgc 2.5B": Script(_edgc(52, 1920, 24, 64, 4), 32),
    "edgc 12.1B": Script(_edgc(76, 3584, 28, 128, 4), 64),
}


def _jupiter(tp: int, pp: int, batch: int, model: str, decay: str = "126_953_125") -> str:
    return (
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} {model} --seq-length 2048 "
        f"--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size {batch} "
        f"--train-samples 300_000_000 {_GPT2} --tokenizer-type GPT2BPETokenizer --loss-scale-window 500 "
        "--hysteresis 2 --min-loss-scale 1.0 --initial-loss-scale 4096 --seed 42 --position-embedding-type rope "
        "--use-flash-attn --sequence-parallel --recompute-activations --recompute-granularity selective "
        "--optimizer adam --adam-beta1 0.9 --adam-beta2 0.999 --adam-eps 1e-8 --lr 1e-4 --min-lr 1e-5 "
        f"--lr-decay-style cosine --lr-decay-samples {decay} --lr-warmup-samples 216_320 --clip-grad 1.0 "
        "--weight-decay 1e-1 --use-distributed-optimizer --log-interval 10 --save-interval 1500 "
        "--eval-interval 1000 --eval-iters 5 --tensorboard-dir t --tensorboard-queue-size 5 "
        "--log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard --save c "
        "--data-path oscar_text_document --split 7,3,1 --distributed-backend nccl"
    )


_13B = "--num-layers 40 --hidden-size 5120 --num-attention-heads 32 --ffn-hidden-size 20480 --fp16"
_175B = "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --init-method-std 0.0048"

JUPITER: dict[str, Script] = {
    "jupiter 13B": Script(_jupiter(2, 4, 1024, _13B), 32),
    "jupiter 13B loaded": Script(_jupiter(2, 4, 1024, _13B) + " --load c", 32),
    "jupiter 13B TP_SIZE=1": Script(_jupiter(1, 4, 2048, _13B), 32),
    "jupiter 175B": Script(_jupiter(8, 8, 96, f"{_175B} --fp16"), 384),
    "jupiter 13B jube": Script(_jupiter(2, 4, 1024, _13B, "128_953_125") + " --exit-duration-in-mins 1190", 32),
    "jupiter 175B jube": Script(
        _jupiter(8, 8, 96, f"{_175B} --bf16", "128_953_125") + " --exit-duration-in-mins 1190", 384
    ),
}

_GPT_345M = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 8 "
    "--seq-length 1024 --max-position-embeddings 1024 --train-iters 500000 --lr-decay-iters 320000 --save c --load c "
    f"--data-path d_text_document {_GPT2} --data-impl mmap --split 949,50,1 --lr 0.00015 --min-lr 1.0e-5 "
    "--lr-decay-style cosine --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01 --log-interval 100 "
    "--save-interval 10000 --eval-interval 1000 --eval-iters 10 --fp16"
)
_LLAMA = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 24 --hidden-size 2048 "
    "--ffn-hidden-size 5504 --num-attention-heads 16 --micro-batch-size {micro} --global-batch-size 32 "
    "--seq-length 2048 --max-position-embeddings 2048 --train-iters 250000 --save c --load c "
    "--data-path {data} --data-impl mmap --tokenizer-type GPTSentencePieceTokenizer "
    "--tokenizer-model tokenizer.model --split 949,50,1 --distributed-backend nccl --lr 3e-4 "
    "--lr-decay-style cosine --min-lr 3e-5 --weight-decay 0.1 --clip-grad 1 --lr-warmup-iters 2000 "
    "--optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --log-interval 1 --bf16 --no-query-key-layer-scaling "
    "--attention-dropout 0 --hidden-dropout 0 --use-rotary-position-embeddings "
    "--untie-embeddings-and-output-weights --swiglu --normalization rmsnorm --disable-bias-linear"
)
_BF16_FILE = (
    '{{"train_batch_size": 32, "train_micro_batch_size_per_gpu": {micro}, "steps_per_print": 1,\n'
    '\t"zero_optimization": {{"stage": {stage}}}, "bf16": {{"enabled": true}}{rest}}}'
)
_FP16_FILE = """{
    "train_batch_size": 256, "train_micro_batch_size_per_gpu": %d, "steps_per_print": 10,
    "zero_optimization": {"stage": %d, "elastic_checkpoint": true},
    "gradient_clipping": 1.0, "prescale_gradients": true,
    "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
             "initial_scale_power": 11},
    "bf16": {"enabled": false},
    "curriculum_learning": {"enabled": %s, "curriculum_type": "seqlen", "min_difficulty": 80,
        "max_difficulty": 2048, "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 110000, "difficulty_step": 8}},
    "wall_clock_breakdown": false
}"""
_DENSE = (
    "--override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.014 "
    "--lr-decay-tokens 260000000000 --lr-warmup-tokens 375000000 --exit-duration-in-mins 30000000 "
    "--global-batch-size 256 --seq-length 2048 --max-position-embeddings 2048 --train-tokens 300000000000 "
    "--train-samples 439453125 --lr 3.0e-4 --min-lr 3.0e-5 --lr-decay-style cosine --log-interval 10 "
    "--eval-interval 100 --eval-iters 10 --save-interval 1000 --weight-decay 0.1 --clip-grad 1.0 --hysteresis 2 "
    "--num-workers 0 --fp16 --load c --save c --tensorboard-queue-size 1 --log-timers-to-tensorboard "
    "--log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard --tensorboard-dir t "
    f"--checkpoint-activations {_GPT2} --data-path enwik8_text_document --data-impl mmap --deepspeed "
    "--deepspeed_config DS --deepspeed-activation-checkpointing"
)
_350M = (
    f"{_DENSE} --tensor-model-parallel-size 1 --moe-expert-parallel-size 1 --num-experts 1 --moe-loss-coeff 0.01 "
    "--moe-train-capacity-factor 1.0 --moe-eval-capacity-factor 1.0 --moe-min-capacity 4 --micro-batch-size 4 "
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --split 98,2,0 --pipeline-model-parallel-size 1"
)

MEGATRON_DEEPSPEED: dict[str, Script] = {
    "megatron-lm pretrain_gpt.sh": Script(f"{_GPT_345M} --distributed-backend nccl --checkpoint-activations", 1),
    "megatron-deepspeed pretrain_gpt.sh": Script(_GPT_345M, 1),
    "megatron-deepspeed pretrain_llama2": Script(
        _LLAMA.format(micro=4, data="1 bookcorpus_text_sentence")
        + " --save-interval 10000 --eval-interval 1000 --eval-iters 10 --num-key-value-heads 4 --zero-stage=0 "
        "--deepspeed_config=DS --deepspeed",
        8,
        _BF16_FILE.format(micro=4, stage=0, rest=""),
    ),
    "megatron-deepspeed pretrain_llama2 logged": Script(
        _LLAMA.format(micro=4, data="1 bookcorpus_text_sentence")
        + " --save-interval 10000 --eval-interval 1000 --eval-iters 10 --num-key-value-heads 4 --wandb-project "
        "pretrain-llama2 --wandb-exp-name exp0 --zero-stage=0 --deepspeed_config=DS --deepspeed",
        8,
        _BF16_FILE.format(micro=4, stage=0, rest=""),
    ),
    "megatron-deepspeed universal llama": Script(
        _LLAMA.format(micro=8, data="my-gpt2_text_document")
        + " --save-interval 100 --eval-interval 10 --eval-iters 40 --exit-interval 200 --tensorboard-dir t "
        "--ds-sequence-parallel-size 1 --universal-checkpoint --zero-stage=1 --deepspeed_config=DS --deepspeed",
        4,
        _BF16_FILE.format(micro=8, stage=1, rest=', "wall_clock_breakdown": false'),
    ),
    "megatron-deepspeed 350M dense": Script(_350M, 8, _FP16_FILE % (4, 0, "false")),
    "megatron-deepspeed 350M curriculum": Script(_350M, 8, _FP16_FILE % (4, 0, "true")),
    "megatron-deepspeed 125M flash": Script(
        f"{_DENSE} --no-gradient-accumulation-fusion --tensor-model-parallel-size 2 --micro-batch-size 2 "
        "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --split 949,50,1 --seed 1234 "
        "--no-async-tensor-model-parallel-allreduce --use-flash-attn --log-optimizer-states-to-tensorboard "
        "--zero-stage 1 --pipeline-model-parallel-size 2",
        8,
        _FP16_FILE % (2, 1, "false"),
    ),
}

_AQSGD = (
    "--model-name {model} --tokenizer-name {tokenizer} --load-pretrained-model true --task-name {task} "
    "--n-epochs 10 --warmup-epochs 1 --num-layers 6 --num-heads {heads} --embedding-dim {hidden} "
    "--num-iters 10000000 --lr {lr} --seq-length {length} --batch-size 32 --micro-batch-size {micro} "
    "--forward-compress-method delta --forward-bits {forward} --backward-compress-method fixpoint "
    "--backward-bits {backward} --dist-url tcp://127.0.0.1:9033 --world-size 8 --pipeline-group-size 8 "
    "--pp-mode gpipe --profiling no-profiling --do-evaluation true --cuda-id 3 --rank 3"
)

AQSGD_LM = Script(
    _AQSGD.format(
        model="checkpoints/gpt2-xl", tokenizer="gpt2-xl", task="arxiv21", heads=25, hidden=1600, lr="5e-5",
        length=1024, micro=1, forward=4, backward=8,
    ),
    8,
)  # fmt: skip
AQSGD_DEBERTA = Script(
    _AQSGD.format(
        model="./checkpoints/deberta-v2-xxl", tokenizer="microsoft/deberta-v2-xxlarge", task="cola", heads=24,
        hidden=1536, lr="2.5e-6", length=256, micro=8, forward=3, backward=6,
    )
    + " --seed 42 --warmup-steps 50",
    8,
)  # fmt: skip

COMPLETE: dict[str, Script] = {**_optimus_scripts(), **RADIUS, **EDGC, **JUPITER, **MEGATRON_DEEPSPEED}
"""Scripts that start without further flags."""
