"""Impossible and contradictory settings are refused in a line that names the flags."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.base.errors import UserError
from megatron.config.data import check_data_given
from megatron.config.flags import parse_args
from megatron.config.run import RunConfig

BALANCE = "--moe-router-load-balancing-type"
FOLDED = "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --make-vocab-size-divisible-by 32"
UPCYCLING = "--load x --moe-use-upcycling"
PP2, PP4 = (f"--pipeline-model-parallel-size {stages}" for stages in (2, 4))
TP2 = "--tensor-model-parallel-size 2"
DISTRIBUTED = "--use-distributed-optimizer"
ROPE = "--position-embedding-type rope"
VIRTUAL = "--num-layers-per-virtual-pipeline-stage"
V = "--pipeline-schedule zb-v"
TENSOR = "--tensor-model-parallel-size"
EXPERT = "--expert-model-parallel-size"
RAMP_UP = "--rampup-batch-size"
STEPS = "--step-batch-size-schedule"
T5 = "--model-type t5 --decoder-seq-length 8 --tokenizer-type BertWordPieceCase --vocab-file v --vocab-extra-ids 4"

# (flags added to a run counted in iterations, processes, words of the message)
BY_ITERATIONS = [
    # Layout
    (f"{TENSOR} 2", 3, [f"{TENSOR} 2", "--pipeline-model-parallel-size 1", "3 processes"]),
    (f"--tensor-model-parallel-size 4 {PP2}", 4, ["--tensor-model-parallel-size 4", "= 8", "4 processes"]),
    ("--tensor-model-parallel-size 8", 8, ["--num-attention-heads 4", "--tensor-model-parallel-size 8"]),
    (f"{TENSOR} 4 --num-query-groups 2", 4, ["--num-query-groups 2", f"{TENSOR} 4"]),
    (f"{TENSOR} 4 --ffn-hidden-size 102", 4, ["--ffn-hidden-size 102", f"{TENSOR} 4"]),
    (f"{TENSOR} 2 --make-vocab-size-divisible-by 32 --compile on", 2, ["--compile on", f"{TENSOR} 2", "leave"]),
    (f"{PP2} --pipeline-schedule zb-h1 --compile on", 2, ["--compile on", "--pipeline-schedule zb-h1", "leave"]),
    ("--deterministic-mode --compile on", 1, ["--compile on", "--deterministic-mode", "leave"]),
    ("--fp8 rowwise", 1, ["--fp8 rowwise", "--bf16", "add it"]),
    ("--fp8 tensorwise --bf16", 1, ["--fp8 tensorwise", "GPUs", "leave it out"]),
    ("--fp8-format hybrid --bf16", 1, ["--fp8 tensorwise", "GPUs"]),
    ("--log-gradients-bins 5", 1, ["--log-gradients-bins 5", "--log-gradients; add it"]),
    ("--num-query-groups 3", 1, ["--num-query-groups 3", "--num-attention-heads 4"]),
    ("--num-layers 5 --pipeline-model-parallel-size 2", 2, ["--num-layers 5", PP2]),
    (f"--sequence-parallel {TENSOR} 2 --seq-length 33", 2, ["--sequence-parallel", "--seq-length 33"]),
    (f"--scatter-gather-tensors-in-pipeline {TP2} {PP2} --seq-length 33", 4,
     ["--scatter-gather-tensors-in-pipeline", "--seq-length 33"]),
    (f"{VIRTUAL} 1", 1, [f"{VIRTUAL} 1", "--pipeline-model-parallel-size of at least 2"]),
    (f"{PP2} --num-layers 10 {VIRTUAL} 2", 2, [f"{VIRTUAL} 2", "5 layers"]),
    (f"{PP2} --num-layers 10 --virtual-pipeline-model-parallel-size 2", 2,
     ["--virtual-pipeline-model-parallel-size 2", "5 layers"]),
    (f"{PP2} --num-layers 8 --num-layers-per-virtual-pipeline-stage 2 --virtual-pipeline-model-parallel-size 4", 2,
     ["--num-layers-per-virtual-pipeline-stage 2", "--virtual-pipeline-model-parallel-size 4"]),
    (f"{PP2} --num-layers-per-virtual-pipeline-stage 2", 2, ["--num-layers-per-virtual-pipeline-stage 2", "one chunk"]),
    (f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --pipeline-schedule gpipe --global-batch-size 4", 2,
     ["--num-layers-per-virtual-pipeline-stage 1", "--pipeline-schedule 1f1b"]),
    (f"{PP2} {VIRTUAL} 1 --global-batch-size 6", 2, ["--global-batch-size 6", "3 micro-batches", PP2, "multiple of 4"]),
    (f"{PP2} {V} --num-layers 6", 2, [V, "--num-layers 6", "multiple of 4", PP2]),
    (f"{PP2} {V} --num-layers 8 --virtual-pipeline-model-parallel-size 4", 2,
     ["--virtual-pipeline-model-parallel-size 4", V, "two chunks", "with 2 of the layers", "leave"]),
    (f"{PP2} {V} --num-layers 8 {VIRTUAL} 1", 2, [f"{VIRTUAL} 1", V, "with 2 of the layers", "leave"]),
    (f"{PP2} {V} --num-layers 4 --recompute-granularity full --recompute-method uniform --recompute-num-layers 2", 2,
     ["--recompute-num-layers 2", "1 layers", "chunk"]),
    (f"{PP2} {V} --num-layers 4 --compile on", 2, ["--compile on", V, "leave"]),
    ("--distributed-backend nccl", 1, ["--distributed-backend nccl", "--distributed-backend gloo"]),
    (f"--DDP-impl torch {PP2}", 2, ["--DDP-impl torch", "--pipeline-model-parallel-size"]),
    ("--DDP-impl torch --accumulate-allreduce-grads-in-fp32", 1,
     ["--DDP-impl torch", "--accumulate-allreduce-grads-in-fp32"]),
    ("--delay 2", 2, ["--delay is 2", "at most 1"]),
    ("--delay 1 --DDP-impl torch", 2, ["--delay 1", "--DDP-impl local"]),
    ("--delay 1 --overlap-grad-reduce", 2, ["--delay 1", "--overlap-grad-reduce", "leave that flag out"]),
    ("--delay 1 --log-gradients --log-json-file j", 2, ["--delay 1", "--log-gradients", "leave one"]),
    ("--delay 1 --no-allreduce", 2, ["--delay 1", "--no-allreduce", "leave one"]),
    ("--delay 1 --compress outer=identity,every=2", 2, ["--delay 1", "islands"]),
    (f"--delay 1 --delay-correction lookahead {DISTRIBUTED} --compress param-gather=float8", 2,
     ["--delay-correction lookahead", "param-gather", "leave one"]),
    ("--delay 1 --delay-correction extrapolate --compress dp-grad=quantized-adam,bits=8,warmup=4", 2,
     ["--delay-correction extrapolate", "clips gradients", "leave one"]),
    (f"--delay 1 --no-pipeline-flush {PP2} --pipeline-schedule zb-h1", 2,
     ["--no-pipeline-flush", "--pipeline-schedule zb-h1", "1f1b or eager-1f1b"]),
    (f"--delay 1 --no-pipeline-flush {PP2} --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 4", 2,
     ["--no-pipeline-flush", "virtual stages", "leave one"]),
    (f"--delay 1 --no-pipeline-flush {PP2} --num-experts 2", 2, ["--no-pipeline-flush", "experts", "leave one"]),
    (f"--delay 1 --no-pipeline-flush {PP2} --compress pp-backward=lowrank,when=epilogue", 2,
     ["--no-pipeline-flush", "when=epilogue", "leave one"]),
    (f"--delay 1 --no-pipeline-flush {PP2} --check-orth-error-acti --compress pp-backward=lowrank,rank=2", 2,
     ["--check-orth-error-acti", "--no-pipeline-flush", "leave one"]),
    ("--DDP-impl torch --use-distributed-optimizer", 1, ["--DDP-impl torch", "--use-distributed-optimizer"]),
    ("--DDP-impl torch --fp16", 1, ["--DDP-impl torch", "--fp16"]),
    ("--DDP-impl torch --bf16", 1, ["--DDP-impl torch", "--bf16"]),
    # Model and precision
    ("--hidden-size 66", 1, ["--hidden-size 66", "--num-attention-heads 4", "--kv-channels"]),
    ("--hidden-size 16 --swiglu", 1, ["--swiglu", "--hidden-size 16", "--ffn-hidden-size"]),
    ("--max-position-embeddings 16", 1, ["--seq-length 32", "--max-position-embeddings 16"]),
    ("--swiglu --squared-relu", 1, ["--swiglu", "--squared-relu"]),
    ("--openai-gelu --squared-relu", 1, ["--openai-gelu", "--squared-relu"]),
    ("--fp16 --bf16", 1, ["--fp16", "--bf16"]),
    ("--fp64 --bf16", 1, ["--fp64", "--bf16"]),
    ("--fp64 --accumulate-allreduce-grads-in-fp32", 1, ["--fp64", "--accumulate-allreduce-grads-in-fp32"]),
    ("--loss-scale 128", 1, ["--loss-scale", "--fp16"]),
    ("--loss-scale 128 --bf16", 1, ["--loss-scale", "--fp16"]),
    ("--fp16 --initial-loss-scale 1 --min-loss-scale 2", 1, ["--min-loss-scale 2", "--initial-loss-scale 1"]),
    ("--rotary-percent 0.5", 1, ["--rotary-percent", "--position-embedding-type rope"]),
    ("--position-embedding-type rope --rotary-percent 0.2", 1, ["--rotary-percent 0.2", "--kv-channels", "3 channels"]),
    ("--position-embedding-type rope --kv-channels 15", 1, ["--kv-channels", "15 channels"]),
    ("--rotary-scaling linear", 1, ["--rotary-scaling needs rotary positions", "--position-embedding-type rope"]),
    ("--rotary-scaling-factor 2", 1, ["--rotary-scaling-factor is for --rotary-scaling linear, llama3 or yarn"]),
    ("--position-embedding-type rope --rotary-scaling linear --rotary-scaling-low-turns 2", 1,
     ["--rotary-scaling-low-turns is for --rotary-scaling llama3"]),
    ("--position-embedding-type rope --rotary-scaling llama3 --rotary-scaling-attention-factor 1.1", 1,
     ["--rotary-scaling-attention-factor is for --rotary-scaling yarn"]),
    ("--position-embedding-type rope --no-yarn-correction-range-round-to-int", 1,
     ["--no-yarn-correction-range-round-to-int is for --rotary-scaling yarn"]),
    ("--position-embedding-type rope --rotary-scaling yarn --yarn-beta-slow 32", 1,
     ["--rotary-scaling-low-turns 32 is not below --rotary-scaling-high-turns 32"]),
    (f"{ROPE} --rotary-scaling yarn --rotary-base 1", 1, ["--rotary-base 1", "above 1", "raise it"]),
    ("--position-embedding-type rope --rotary-scaling llama3 --rotary-scaling-low-turns 4", 1,
     ["--rotary-scaling-low-turns 4 is not below --rotary-scaling-high-turns 4"]),
    ("--model-type bert --sliding-window 4", 1, ["--sliding-window", "BERT attends to later ones", "leave it out"]),
    ("--model-type bert --qk-layernorm", 1, ["--qk-layernorm: only GPT", "leave it out for bert"]),
    ("--model-type bert --sandwich-norm", 1, ["--sandwich-norm: only GPT", "leave it out for bert"]),
    (f"{T5} --attn-logit-softcapping 5", 1, ["--attn-logit-softcapping: only GPT", "leave it out for t5"]),
    (f"{T5} --final-logit-softcapping 5", 1, ["--final-logit-softcapping: only GPT", "leave it out for t5"]),
    (f"{T5} --query-pre-attn-scalar 5", 1, ["--query-pre-attn-scalar: only GPT", "leave it out for t5"]),
    (f"{T5} --apply-embedding-scaling", 1, ["--apply-embedding-scaling: only GPT", "leave it out for t5"]),
    ("--rope-local-base-freq 50 --sliding-window 4", 1, ["--rope-local-base-freq needs rotary positions", "add"]),
    ("--rope-local-base-freq 50 --position-embedding-type rope", 1,
     ["--rope-local-base-freq is for layers with a window", "add --sliding-window"]),
    ("--attn-logit-softcapping 0", 1, ["--attn-logit-softcapping is 0", "above 0"]),
    ("--geglu --swiglu", 1, ["--swiglu and --geglu exclude each other"]),
    ("--geglu --hidden-size 16", 1, ["--geglu: --hidden-size 16 is too small for a default"]),
    ("--model-type bert --num-tokentypes 1", 1, ["--num-tokentypes 1", "types 0 and 1", "give 0 or at least 2"]),
    ("--num-tokentypes 2", 1, ["--num-tokentypes 2", "only BERT's samples", "run pretrain_bert.py"]),
    # T5
    ("--model-type t5", 1, ["not given but required: --decoder-seq-length; add it"]),
    (f"{T5} --decoder-seq-length 2", 1, ["--decoder-seq-length is 2", "at least 3"]),
    (f"{T5} --max-position-embeddings 32 --decoder-seq-length 33", 1, ["--decoder-seq-length 33", "longer", "raise"]),
    (f"{T5} --vocab-extra-ids 0", 1, ["extra ids", "give --vocab-extra-ids 100"]),
    (f"{T5} --tokenizer-type NullTokenizer", 1, ["T5 masks whole words", "--tokenizer-type BertWordPieceLowerCase"]),
    (f"{T5} --untie-embeddings-and-output-weights", 1, ["--untie-embeddings-and-output-weights", "one embedding"]),
    (f"{T5} --position-embedding-type rope", 1, ["--position-embedding-type rope", "T5 has learned positions"]),
    (f"{T5} --parallel-residual", 1, ["--parallel-residual", "sequential", "leave it out"]),
    (f"{T5} --sliding-window 4", 1, ["--sliding-window", "T5 attends to later ones", "leave it out"]),
    (f"{T5} --curriculum-learning --curriculum-seqlen-min 16 --curriculum-seqlen-steps 9", 1,
     ["--curriculum-learning"]),
    (f"{T5} {PP2} --pipeline-model-parallel-split-rank 0", 2, ["split-rank 0", "the encoder none of the 2", "give 1"]),
    (f"{T5} {PP4} --pipeline-model-parallel-split-rank 4", 4, ["split-rank 4", "decoder none of the 4", "1 to 3"]),
    (f"{T5} {PP4} --pipeline-model-parallel-split-rank 3", 4, ["--num-layers 4", "3 pipeline stages before"]),
    (f"{T5} {PP4} --decoder-num-layers 3", 4, ["--decoder-num-layers 3", "2 pipeline stages after"]),
    (f"{T5} {PP2} {VIRTUAL} 1", 2, [f"{VIRTUAL} 1", "leave"]),
    (f"{T5} {PP2} --virtual-pipeline-model-parallel-size 2", 2, ["--virtual-pipeline-model-parallel-size 2", "leave"]),
    (f"{T5} {PP2} {V} --num-layers 4", 2, [V, "encoder-decoder", "another schedule"]),
    (f"{T5} {TP2} --sequence-parallel --decoder-seq-length 9", 2, ["--decoder-seq-length 9", "is not a multiple of"]),
    (f"{T5} --checkpoint-activations --checkpoint-num-layers 5", 1, ["--recompute-num-layers 5", "4 layers"]),
    (f"{T5} {PP4} --pipeline-model-parallel-split-rank 1 --decoder-num-layers 3 {DISTRIBUTED} "
     "--compress param-gather=fixpoint,stages=last:3", 8,
     ["param-gather=fixpoint", "stages 0, 1, 3 hold the same embedding", "write stages=all"]),
    ("--window-attn-skip-freq 2", 1, ["selects the layers with a window", "add --sliding-window"]),
    ("--sliding-window 4 --window-attn-skip-freq 1 0 1 1 0", 1,
     ["--window-attn-skip-freq 1 0 1 1 0", "at least 2, or 0 or 1 for each of the"]),
    ("--sliding-window 0", 1, ["--sliding-window is 0", "at least 1"]),
    ("--add-qkv-bias", 1, ["--add-qkv-bias", "--disable-bias-linear"]),
    ("--rotary-percent 1.5", 1, ["--rotary-percent", "at most 1"]),
    ("--rotary-percent 0", 1, ["--rotary-percent", "above 0"]),
    ("--hidden-dropout 1", 1, ["--hidden-dropout", "below 1"]),
    ("--attention-dropout=-0.1", 1, ["--attention-dropout", "at least 0"]),
    ("--num-layers 0", 1, ["--num-layers is 0", "at least 1"]),
    # Recomputation
    ("--recompute-method uniform", 1, ["--recompute-method uniform", "--recompute-granularity full"]),
    ("--recompute-granularity selective --recompute-method block", 1,
     ["--recompute-method block", "--recompute-granularity full"]),
    ("--recompute-num-layers 2", 1, ["--recompute-num-layers 2", "--recompute-granularity full"]),
    (f"{PP2} --checkpoint-activations --checkpoint-num-layers 3", 2, ["--recompute-num-layers 3", "2 layers"]),
    # Batches and length
    ("--global-batch-size 7", 1, ["--global-batch-size 7", "--micro-batch-size 2"]),
    ("--global-batch-size 4", 4, ["--global-batch-size 4", "--micro-batch-size 2 x 4", "= 8"]),
    ("--train-samples 10", 1, ["--train-iters", "--train-samples"]),
    ("--train-tokens 10_000", 1, ["--train-iters", "--train-tokens"]),
    (f"{RAMP_UP} 2 2 100 --global-batch-size 8", 1, [RAMP_UP, "--train-iters", "--train-samples"]),
    ("--step-batch-size-schedule 0:2,320:4", 1, ["--step-batch-size-schedule", "--train-iters", "--train-samples"]),
    # Schedules
    ("--lr-decay-samples 10", 1, ["--lr-decay-samples", "--train-iters", "--lr-decay-iters"]),
    ("--lr-warmup-samples 10", 1, ["--lr-warmup-samples", "--train-iters", "--lr-warmup-iters"]),
    ("--lr-decay-tokens 10000", 1, ["--lr-decay-tokens", "--train-samples", "--lr-decay-iters"]),
    ("--lr-warmup-tokens 10000", 1, ["--lr-warmup-tokens", "--train-samples", "--lr-warmup-iters"]),
    ("--lr-warmup-iters 5 --lr-warmup-fraction 0.1", 1, ["--lr-warmup-iters", "--lr-warmup-fraction"]),
    ("--iterations-to-skip 5 0", 1, ["--iterations-to-skip 0", "100-120"]),
    ("--iterations-to-skip 9-5", 1, ["--iterations-to-skip 9-5", "100-120"]),
    ("--lr-warmup-init 0.5", 1, ["--lr-warmup-init 0.5", "--lr 0.001"]),
    ("--lr-decay-style WSD", 1, ["--lr-decay-style WSD", "--lr-wsd-decay-iters"]),
    ("--lr-wsd-decay-samples 10", 1, ["--lr-wsd-decay-samples", "--train-iters", "--lr-wsd-decay-iters"]),
    ("--lr-warmup-iters 100", 1, ["--lr-warmup-iters 100", "--lr-decay-iters 100"]),
    ("--lr-warmup-fraction 1", 1, ["--lr-warmup-fraction", "below 1"]),
    ("--min-lr 1", 1, ["--min-lr 1", "--lr 0.001"]),
    ("--decoupled-min-lr 1e-5", 1, ["--decoupled-min-lr", "needs --decoupled-lr"]),
    ("--decoupled-lr 1e-4 --decoupled-min-lr 1e-3", 1,
     ["--decoupled-min-lr 0.001", "--decoupled-lr 0.0001", "lower it"]),
    ("--decoupled-lr 1e-5 --min-lr 1e-4", 1, ["--min-lr 0.0001", "--decoupled-lr 1e-05", "add --decoupled-min-lr"]),
    ("--decoupled-lr 1e-5 --lr-warmup-init 1e-4 --lr-warmup-iters 3", 1,
     ["--lr-warmup-init 0.0001", "--decoupled-lr 1e-05"]),
    ("--start-weight-decay 0.1", 1, ["--start-weight-decay", "--weight-decay-incr-style"]),
    ("--end-weight-decay 0.1", 1, ["--end-weight-decay", "--weight-decay-incr-style"]),
    ("--weight-decay-incr-style linear --end-weight-decay 0.1", 1,
     ["--weight-decay-incr-style linear", "--start-weight-decay"]),
    ("--weight-decay-incr-style cosine --start-weight-decay 0.2 --end-weight-decay 0.1", 1,
     ["--end-weight-decay 0.1", "--start-weight-decay 0.2"]),
    ("--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler", 1,
     ["--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"]),
    # Data and tokenizer
    ("--split=-1,2", 1, ["--split -1,2"]),
    ("--split 0,0,0", 1, ["--split 0,0,0", "sum to 0"]),
    ("--data-path 0.5 a b", 1, ["--data-path", "3 words are not pairs of a weight and a path"]),
    ("--train-data-path nan a 1 b", 1, ["--train-data-path", "the weight nan of a"]),
    ("--data-path a --train-data-path b", 1, ["--data-path", "--train-data-path"]),
    ("--data-path a --test-data-path b", 1, ["--data-path", "--test-data-path"]),
    ("--valid-data-path b", 1, ["--valid-data-path", "--train-data-path"]),
    ("--tokenizer-type GPT2BPETokenizer --vocab-file v", 1, ["GPT2BPETokenizer", "--merge-file"]),
    ("--tokenizer-type GPT2BPETokenizer", 1, ["--vocab-file and --merge-file"]),
    ("--tokenizer-type SentencePieceTokenizer", 1, ["SentencePieceTokenizer", "--tokenizer-model"]),
    ("--tokenizer-type BertWordPieceCase", 1, ["BertWordPieceCase", "--vocab-file"]),
    ("--tokenizer-type HFTokenizer", 1, ["HFTokenizer", "--tokenizer-model"]),
    # Checkpoints
    ("--save-interval 10", 1, ["--save-interval", "--save FOLDER"]),
    ("--async-save", 1, ["--async-save", "--save FOLDER"]),
    ("--keep-last 2", 1, ["--keep-last", "--save FOLDER"]),
    ("--keep-last 0 --save x", 1, ["--keep-last", "at least 1"]),
    ("--no-save-optim", 1, ["--no-save-optim", "--save FOLDER"]),
    ("--finetune", 1, ["--finetune", "--load FOLDER"]),
    ("--moe-use-upcycling --num-experts 4", 1, ["--moe-use-upcycling", "--load FOLDER"]),
    (UPCYCLING, 1, ["--moe-use-upcycling", "add --num-experts"]),
    (f"{UPCYCLING} --num-experts 4 --moe-ffn-hidden-size 8", 1, ["--moe-use-upcycling", "--moe-ffn-hidden-size is 8"]),
    (f"{UPCYCLING} --num-experts 4 --topk 1", 1, ["--moe-use-upcycling", "--moe-router-topk 1", "give at least 2"]),
    (f"{UPCYCLING} --num-experts 4 --moe-router-pre-softmax", 1, ["--moe-use-upcycling", "--moe-router-pre-softmax"]),
    (f"{UPCYCLING} --num-experts 4 --moe-router-topk-scaling-factor 2", 1,
     ["--moe-use-upcycling", "--moe-router-topk-scaling-factor 2", "leave that out"]),
    (f"{UPCYCLING} --num-experts 4 --moe-shared-expert-intermediate-size 8", 1,
     ["--moe-use-upcycling", "--moe-shared-expert-intermediate-size", "leave it out"]),
    # Experts
    (f"{FOLDED} --expert-model-parallel-size 2", 4, ["--expert-model-parallel-size 2", "--num-experts"]),
    (f"{FOLDED} --num-experts 8", 4, ["--expert-model-parallel-size 1 is not a multiple", "--tensor-model-parallel"]),
    (f"{FOLDED} --num-experts 8 {EXPERT} 3", 6, [f"{EXPERT} 3 is not a multiple", f"{TENSOR} 2"]),
    (f"{FOLDED} --num-experts 8 {EXPERT} 8", 4, [f"{EXPERT} 8", "the 4 tensor- and data-parallel processes"]),
    (f"{FOLDED} --num-experts 6 {EXPERT} 4", 4, [f"{EXPERT} 4", "does not divide the 6 experts"]),
    ("--tensor-model-parallel-size 4 --expert-tensor-parallel-size 2 --num-experts 8", 4,
     ["--expert-tensor-parallel-size 2", "write 1, or leave it out for --tensor-model-parallel-size 4"]),
    ("--num-experts 4 --expert-model-parallel-size 2 --compress dp-grad=quantized-adam,warmup=2", 2,
     ["dp-grad=quantized-adam", "clips each replica's gradient", "--expert-model-parallel-size 2", "leave one"]),
    ("--num-experts 4 --DDP-impl torch", 1, ["--DDP-impl torch", "experts", "--DDP-impl local"]),
    ("--compress experts=agressive", 2, ["--compress experts=agressive", "the nearest is aggressive"]),
    ("--ckpt-step 3", 1, ["--ckpt-step", "--load FOLDER"]),
    ("--load x --ckpt-step=-3", 1, ["--ckpt-step", "at least 0"]),
    ("--use-checkpoint-args", 1, ["--use-checkpoint-args", "--load FOLDER"]),
    ("--exit-on-missing-checkpoint", 1, ["--exit-on-missing-checkpoint", "--load FOLDER"]),
    # Experts
    ("--num-experts 4 --topk 5", 1, ["--moe-router-topk 5", "4 experts", "--num-experts"]),
    ("--num-experts 0", 1, ["--num-experts", "at least 1"]),
    ("--num-experts 4 --moe-expert-capacity-factor 0", 1, ["--moe-expert-capacity-factor", "above 0"]),
    ("--num-experts 4 --moe-min-capacity 0", 1, ["--moe-min-capacity", "at least 1"]),
    ("--num-experts 4 8 2", 1, ["--num-experts 4 8 2", "3 numbers for the 4 layers"]),
    ("--num-experts 4 --expert-model-parallel-size 3", 3, ["--expert-model-parallel-size 3", "--num-experts"]),
    ("--num-experts 4 --expert-model-parallel-size 4", 2, ["--expert-model-parallel-size 4", "data-parallel"]),
    ("--expert-model-parallel-size 2", 2, ["--expert-model-parallel-size 2", "--num-experts"]),
    ("--num-experts 8 --moe-router-num-groups 2", 1, ["--moe-router-num-groups", "needs --moe-router-group-topk"]),
    ("--num-experts 8 --moe-router-group-topk 2", 1, ["--moe-router-group-topk", "needs --moe-router-num-groups"]),
    ("--num-experts 8 --moe-router-num-groups 3 --moe-router-group-topk 1", 1,
     ["--moe-router-num-groups 3", "8 experts"]),
    ("--num-experts 8 --moe-router-num-groups 2 --moe-router-group-topk 3", 1,
     ["--moe-router-group-topk 3", "--moe-router-num-groups 2"]),
    ("--num-experts 4 --moe-router-num-groups 4 --moe-router-group-topk 1 --topk 2", 1,
     ["--moe-router-topk 2", "the 1 experts of --moe-router-group-topk"]),
    (f"--num-experts 8 {BALANCE} aux_loss none", 1, ["--moe-router-load-balancing-type aux_loss none", "none alone"]),
    (f"--num-experts 8 {BALANCE} aux_loss aux_loss", 1, ["--moe-router-load-balancing-type", "each loss once"]),
    (f"--num-experts 8 {BALANCE} aux_loss --moe-aux-loss-coeff 1 2", 1, ["--moe-aux-loss-coeff 1 2", "1 losses"]),
    # Evaluation and logs
    ("--eval-iters=-1", 1, ["--eval-iters", "at least 0"]),
    ("--eval-interval 0", 1, ["--eval-interval", "at least 1"]),
    ("--log-interval 0", 1, ["--log-interval", "at least 1"]),
    ("--timing-log-level 3", 1, ["--timing-log-level", "at most 2"]),
    # Compression
    ("--compress dp-grad=powersdg,rank=4", 2, ["--compress", "'powersdg'", "the nearest is powersgd"]),
    ("--compress dp-grad=powersgd,rnak=4", 2, ["--compress", "'rnak'", "the nearest is rank", "warm-start"]),
    ("--compress dp-grad=powersgd,rank=0", 2, ["--compress", "rank=0", "at least 1"]),
    ("--compress dp-grad=powersgd,rank=many", 2, ["--compress", "rank=many", "is not an integer"]),
    ("--compress powersgd", 2, ["--compress powersgd", "POINT=NAME"]),
    ("--compress auot", 2, ["--compress auot", "POINT=NAME", "the nearest is auto"]),
    ("--compress dp-gard=powersgd", 2, ["--compress dp-gard=powersgd", "the nearest is dp-grad"]),
    ("--compress dp-grad=powersgd --compress dp-grad=none", 2, ["dp-grad", "given twice"]),
    ("--compress dp-grad=powersgd,rank=2,rank=3", 2, ["rank", "given twice"]),
    ("--compress dp-grad=powersgd,rank", 2, ["'rank'", "key=value"]),
    ("--compress dp-grad=lowrank", 2, ["dp-grad", "use powersgd"]),
    ("--compress pp-forward=powersgd", 2, ["pp-forward", "use lowrank"]),
    ("--compress pp-forward=fixpoint,bits=9", 2, ["bits=9", "at least 1 and at most 8"]),
    ("--compress pp-forward=fixpoint,scale=row", 2, ["scale=row", "group, channel, tensor"]),
    ("--compress pp-forward=fixpoint,when=epilogue", 2, ["when=epilogue", "only pp-backward"]),
    ("--compress pp-backward=fixpoint,eval=on", 2, ["eval=on", "leave it out"]),
    ("--compress tp-forward=fixpoint,error-feedback=on", 2, ["error-feedback", "has no state"]),
    ("--compress dp-grad=powersgd,fused=on", 2, ["fused=on", "only the embedding"]),
    ("--grad-comp --compress dp-grad=powersgd", 2, ["dp-grad", "given twice"]),
    ("--compress dp-grad=powersgd,error-feedback=lazy", 2, ["error-feedback=lazy", "local, aggregate"]),
    ("--compress dp-grad=powersgd,warmup=1.5", 2, ["warmup=1.5", "fraction"]),
    ("--compress dp-grad=powersgd,stages=3", 2, ["stages=3", "first:N"]),
    ("--compress dp-grad=powersgd --DDP-impl torch", 2, ["dp-grad=powersgd", "use --DDP-impl local"]),
    (f"{PP2} --compress embedding=fused --use-distributed-optimizer", 4, ["embedding=fused", "leave"]),
    (f"{PP2} --compress param-gather=fixpoint,stages=first:1 --use-distributed-optimizer", 4,
     ["param-gather=fixpoint", "stages", "--untie-embeddings-and-output-weights"]),
    ("--compress param-gather=powersgd", 2, ["powersgd cannot serve param-gather", "use fixpoint"]),
    ("--compress control=none", 2, ["control", "the points are"]),
    ("--compress dp-grad=mine --compress-module nowhere.py", 2, ["nowhere.py", "no such file"]),
]  # fmt: skip

BY_SAMPLES = [
    ("--lr-decay-iters 10", 1, ["--lr-decay-iters", "--train-samples", "--lr-decay-samples"]),
    ("--lr-warmup-iters 10", 1, ["--lr-warmup-iters", "--train-samples", "--lr-warmup-samples"]),
    ("--lr-warmup-samples 10 --lr-warmup-fraction 0.1", 1, ["--lr-warmup-samples", "--lr-warmup-fraction"]),
    ("--lr-warmup-samples 6400", 1, ["--lr-warmup-samples 6400", "--lr-decay-samples 6400"]),
    ("--lr-decay-samples 100 --lr-decay-tokens 100", 1, ["--lr-decay-samples", "--lr-decay-tokens"]),
    ("--lr-warmup-samples 5 --lr-warmup-tokens 100", 1, ["--lr-warmup-samples", "--lr-warmup-tokens"]),
    ("--train-samples 5 --global-batch-size 6", 1, ["--train-samples 5", "--global-batch-size"]),
    ("--step-batch-size-schedule 0:2,320 --train-samples 64", 1, ["--step-batch-size-schedule 0:2,320", "320 is not"]),
    ("--step-batch-size-schedule 0:2,320:5", 1, ["batch of 5 is not a multiple", "leave out passed entries"]),
    ("--step-batch-size-schedule 0:2,320:2M", 1, ["--step-batch-size-schedule", "a batch of 2000000 is above 1048576"]),
    ("--step-batch-size-schedule 0:8 --train-samples 7", 1, ["--train-samples 7", "one global batch of 8"]),
    ("--step-batch-size-schedule 0:2,320:4 --global-batch-size 2", 1,
     ["--global-batch-size 2 contradicts --step-batch-size-schedule, which ends with 4", "leave it out"]),
    (f"{STEPS} 0:2,320:4 {RAMP_UP} 2 2 8 --global-batch-size 4", 1, [f"{RAMP_UP} and {STEPS} exclude each other"]),
    (f"{STEPS} 0:2,320:4 --curriculum-learning --curriculum-seqlen-min 8 --curriculum-seqlen-steps 5", 1,
     [STEPS, "--curriculum-learning has shorter ones", "use --rampup-batch-size"]),
    ("--train-tokens 31", 1, ["--train-tokens 31", "--seq-length 32"]),
    ("--rampup-batch-size 2 2 100", 1, ["--rampup-batch-size", "--global-batch-size"]),
    ("--rampup-batch-size 2 4 100 --global-batch-size 8", 1, ["--rampup-batch-size 2 4 100", "--global-batch-size 8"]),
    (f"{RAMP_UP} 10 2 100 --global-batch-size 8", 1, [f"{RAMP_UP} 10 2 100", "--global-batch-size 8"]),
    ("--rampup-batch-size 0 2 100 --global-batch-size 8", 1, ["--rampup-batch-size 0 2 100", "at least 1"]),
    (f"{RAMP_UP} 2 3 100 --global-batch-size 8", 1, [f"{RAMP_UP} 2 3 100", "batch of 5", "--micro-batch-size 2"]),
    (f"{RAMP_UP} 2 2 100 --global-batch-size 8 {PP2} {VIRTUAL} 1", 2, [f"{RAMP_UP} 2 2 100", "batch of 2", VIRTUAL]),
]  # fmt: skip


def _refusal(words: list[str], world_size: int) -> str:
    parsed = parse_args(words)
    with pytest.raises(UserError) as caught:
        parsed.resolve(world_size)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("length", "flags", "world_size", "words"),
    [("--train-iters=100", *case) for case in BY_ITERATIONS] + [("--train-samples=6400", *case) for case in BY_SAMPLES],
)
def test_invalid_settings_are_refused(
    minimal: list[str], length: str, flags: str, world_size: int, words: list[str]
) -> None:
    message = _refusal([*minimal, length, *flags.split()], world_size)
    assert all(word in message for word in words), message


REQUIRED = ["--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--micro-batch-size", "--lr"]


def test_all_missing_flags_are_named_together() -> None:
    message = _refusal([], 1)
    for flag in (*REQUIRED, "--train-iters", "--train-samples", "--tokenizer-type"):
        assert flag in message


@pytest.mark.parametrize("missing", REQUIRED)
def test_a_single_missing_flag_is_named(by_iterations: list[str], missing: str) -> None:
    index = by_iterations.index(missing)
    message = _refusal(by_iterations[:index] + by_iterations[index + 2 :], 1)
    assert message == f"not given but required: {missing}; add it"


def test_a_world_size_of_zero_is_refused() -> None:
    with pytest.raises(UserError, match="world size is 0"):
        RunConfig().resolve(0)


def test_values_set_in_code_are_checked(by_iterations: list[str]) -> None:
    config = parse_args(by_iterations).config
    model = dataclasses.replace(config.model, normalization="batchnorm")  # type: ignore[arg-type]
    bad = dataclasses.replace(config, model=model)
    with pytest.raises(UserError, match="--normalization: 'batchnorm' is not one of LayerNorm, RMSNorm"):
        bad.resolve(1)
    empty = dataclasses.replace(config, data=dataclasses.replace(config.data, split=None))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="--split has no value"):
        empty.resolve(1)


def test_a_missing_dataset_is_refused(by_iterations: list[str]) -> None:
    config = parse_args(by_iterations).resolve(1)
    with pytest.raises(UserError, match="--data-path"):
        check_data_given(config.data)
    check_data_given(parse_args([*by_iterations, "--train-data-path", "a"]).resolve(1).data)


def test_settings_similar_to_refused_settings_resolve(by_iterations: list[str]) -> None:
    for flags, world_size in (
        (f"{TENSOR} 4 --make-vocab-size-divisible-by 32 --num-query-groups 4 --sequence-parallel", 4),
        (f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8", 2),
        ("--hidden-size 66 --kv-channels 16", 1),
        ("--position-embedding-type rope --rotary-percent 0.25", 1),
        ("--position-embedding-type rope --max-position-embeddings 16", 1),
        ("--fp16 --loss-scale 128", 1),
        (f"--delay 1 --no-pipeline-flush {PP2} --fp16 --compress auto --save s", 2),
        ("--bf16 --initial-loss-scale 4096", 1),
        ("--lr-warmup-iters 99", 1),
        ("--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.1", 1),
        ("--DDP-impl torch", 4),
        ("--valid-data-path b --skip-train", 1),
        ("--data-path a b", 1),
        ("--tokenizer-type NullTokenizer", 1),
        ("--compress dp-grad=none --compress embedding=identity", 1),
        (f"--delay 1 --delay-correction lookahead {DISTRIBUTED} --compress param-gather=none", 2),
    ):
        resolved = parse_args([*by_iterations, *flags.split()]).resolve(world_size)
        assert resolved.resolve(world_size) == resolved, flags  # nothing is left to resolve
