"""Flags of Megatron-LM, Megatron-DeepSpeed, Optimus-CC, Radius, EDGC and AQ-SGD that are not fields here.

Harmless flags are accepted, and reported once with the reason. Flags that would change the training are refused with
advice, unless given with their neutral value. Names are written without dashes.
"""

from __future__ import annotations

from functools import partial

from megatron.config.translate.megatron_lm_known import MEGATRON_LM_FLAGS
from megatron.config.translate.not_offered import NOT_OFFERED
from megatron.config.translate.rules import KnownFlag, known_flags

_harmless = partial(known_flags, refused=False)
_refused = partial(known_flags, refused=True)

_HARMLESS = [
    # Precision and kernels
    _harmless(
        "--fp8 takes each scale from the tensor's own largest magnitude, at once and without a margin",
        values="fp8-margin fp8-interval fp8-amax-history-len fp8-amax-compute-algo",
    ),
    _harmless("--fp8 rowwise computes weight gradients in bf16", switches="no-fp8-wgrad"),
    _harmless(
        "there is one implementation of the layers, in plain PyTorch",
        switches="use-mcore-models",
        values="transformer-impl onnx-safe attention-backend",
    ),
    _harmless(
        "attention without --attn-logit-softcapping always goes through scaled_dot_product_attention, which uses flash "
        "kernels where it can",
        switches="use-flash-attn use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton use-flash-attn-builder",
    ),
    _harmless(
        "autograd adds gradients into the buffers in place, without a fused kernel",
        switches="no-gradient-accumulation-fusion",
    ),
    _harmless(
        "there is no such fused kernel to turn on or off; the numbers are the same",
        switches="no-masked-softmax-fusion no-bias-dropout-fusion no-bias-swiglu-fusion no-rope-fusion "
        "no-persist-layer-norm disable-mem-efficient-ln scaled-upper-triang-masked-softmax-fusion "
        "scaled-masked-softmax-fusion tp-comm-overlap",
    ),
    _harmless(
        "attention scores are never scaled by the layer's number, which would change rounding only",
        switches="no-query-key-layer-scaling apply-query-key-layer-scaling",
    ),
    _harmless(
        "scaled_dot_product_attention accumulates the softmax in fp32 by itself",
        switches="attention-softmax-in-fp32",
    ),
    # Parallelism
    _harmless(
        "gradient and parameter buffers are contiguous, and are reduced as soon as they are ready",
        switches="no-contiguous-buffers-in-local-ddp no-delay-grad-reduce delay-grad-reduce "
        "overlap-param-gather delay-param-gather align-grad-reduce",
    ),
    _harmless(
        "pipeline sends and receives are asynchronous and overlap compute",
        switches="overlap-p2p-communication no-overlap-p2p-communication use-ring-exchange-p2p",
    ),
    _harmless(
        "every step of --pipeline-schedule zb-h1 is exact",
        switches="enable-zbh1-exact-semantics",
    ),
    _harmless(
        "saved activations stay where they were computed; it would change memory only",
        switches="distribute-saved-activations distribute-checkpointed-activations partition-activations "
        "contigious-checkpointing checkpoint-in-cpu synchronize-each-layer profile-backward "
        "deepspeed-activation-checkpointing no-clone-scatter-output-in-embedding",
    ),
    _harmless(
        "initial weights do not depend on the device and are always drawn before a checkpoint replaces them",
        switches="use-cpu-initialization no-initialization",
        lists="lazy-mpu-init",
    ),
    # DeepSpeed
    _harmless(
        "DeepSpeed is not used; the flags here say everything",
        switches="deepspeed ds-inference inference cpu-optimizer cpu-torch-adam ds-fused-adam "
        "force-ds-sequence-parallel ds-sequence-parallel-fpdt-offloading scattered-embeddings "
        "split-transformers memory-centric-tiled-linear use-pin-memory",
        values="ds-sequence-parallel-fpdt-chunk-size tile-factor remote-device",
    ),
    _harmless(
        "state is sharded by --use-distributed-optimizer, in buckets of --ddp-bucket-size",
        switches="zero-reduce-scatter zero-contigious-gradients",
        values="zero-reduce-bucket-size zero-allgather-bucket-size",
    ),
    # Logs and tools
    _harmless("timers add no barriers", switches="no-barrier-with-level-1-timing barrier-with-l1-time"),
    _harmless("Muon has Nesterov's momentum unless --no-muon-nesterov is given", switches="muon-nesterov"),
    _harmless(
        "whatever the layout, Muon's matrices are whole, and one process orthogonalizes each", values="muon-tp-mode"
    ),
    _harmless("optimizer states are not written", switches="log-optimizer-states-to-tensorboard"),
    _harmless("throughput is always logged", switches="log-throughput"),
    _harmless("memory is always written", switches="log-memory-to-tensorboard"),
    _harmless(
        "see --profile-trace and --timing-log-level for where time goes",
        values="profile-steps",
        lists="profile profile-ranks",
    ),
    _harmless(
        "see --exit-signal-handler and --exit-duration-in-mins",
        switches="adlr-autoresume",
        values="adlr-autoresume-interval",
    ),
    _harmless(
        "steps whose gradients are not finite are skipped, unless --check-for-nan-in-loss-and-grad ends the run",
        switches="no-check-for-nan-in-loss-and-grad",
    ),
    # Data
    _harmless("files are memory-mapped and read on demand", switches="mmap-warmup"),
    _harmless("no remote code is ever run", switches="trust-remote-code"),
    _harmless("batches always carry the identity of their samples", switches="return-data-index"),
    _harmless("samples go on into the next epoch by themselves", switches="repeated-dataloader"),
    _harmless("the attention mask is never materialized", switches="no-create-attention-mask-in-dataloader"),
    _harmless(
        "randomness is drawn from the seed and what it is for, so there is no random state",
        switches="no-save-rng no-load-rng",
    ),
    _harmless("every checkpoint loads at any layout", switches="universal-checkpoint"),
    _harmless("cached memory is kept", values="empty-unused-memory-level"),
    _harmless("checkpoints have one format", values="ckpt-format dist-ckpt-format"),
    # Other models and programs
    _harmless(
        "tokens go to their experts by all-to-alls (--moe-two-stage), and all experts' products are grouped where the "
        "device can",
        switches="moe-grouped-gemm moe-permute-fusion",
        values="moe-token-dispatcher-type",
    ),
    _harmless("the router always computes in fp32 (fp64 in fp64 runs)", values="moe-router-dtype"),
    _harmless(
        "--log-json-file has the tokens of each layer's experts, and TensorBoard its load",
        switches="moe-per-layer-logging",
    ),
    _harmless(
        "messages have the sizes that tokens need, so nothing is padded", switches="moe-pad-expert-input-to-capacity"
    ),
    _harmless("tokens are not yet on their way while others are computed", switches="overlap-moe-expert-parallel-comm"),
    _harmless(
        "no token is dropped unless --moe-expert-capacity-factor is given",
        switches="disable-moe-token-dropping",
    ),
    _harmless(
        "experts' parameters have buffers of their own, and tokens are routed by this package's code",
        switches="create-moe-param-group disable-moe-top2-2nd-expert-sampling use-tutel "
        "enable-expert-tensor-parallelism",
    ),
    _harmless(
        "--get-val-ppls on the command line asks for the losses of checkpoints, which it is for",
        values="src-ckpt-path val-start-iteration val-target-iteration val-ckpt-interval val-ppls-save-path",
        program="val_check_gpt.py, and pretrain_gpt.py with --get-val-ppls",
    ),
    _harmless("Optimus-CC did not read it either", switches="check-comp-speed check-comp-ratio"),
    _harmless("AQ-SGD's runners did not read it either; give --data-path", lists="train-data valid-data"),
    _harmless(
        "tools/plot_grad_distribution.py draws what --log-gradients records",
        switches="plot-gradients-density",
        values="plot-gradients-density-type plot-gradients-density-interval plot-gradients-density-output-dir",
    ),
    _harmless(
        "the run's length is --train-iters, --train-samples or --train-tokens",
        values="n-epochs num-iters",
    ),
    _harmless("only language models are trained", values="task-type"),
    _harmless(
        "the launcher's environment says which process this is (torchrun sets it), and --distributed-backend how "
        "processes talk",
        values="rank world-size dist-url dist-backend cuda-id cuda-num use-cuda",
    ),
    _harmless("see --profile-trace for where time goes", values="profiling trace-postfix debug-mem"),
    _harmless(
        "only text generation reads it",
        values="inference-batch-times-seqlen-threshold max-tokens-to-oom",
    ),
    _harmless(
        "embeddings of texts are not written",
        switches="output-bert-embeddings",
        values="bert-embedder-type",
    ),
    _harmless(
        "only retrieval models read it",
        switches="biencoder-shared-query-context-model use-one-sent-docs retriever-score-scaling",
        values="retriever-seq-length ict-head-size biencoder-projection-dim ict-load bert-load "
        "titles-data-path query-in-block-prob "
        "evidence-data-path block-data-path embedding-path indexer-batch-size "
        "indexer-log-interval",
        lists="retriever-report-topk-accuracies",
    ),
    _harmless(
        "only vision models read it",
        switches="no-data-sharding vision-pretraining dino-norm-last-layer",
        values="num-classes img-h img-w img-dim num-channels patch-dim classes-fraction data-per-class-fraction "
        "head-lr-mult vision-pretraining-type vision-backbone-type swin-backbone-type mask-type mask-factor "
        "iter-per-epoch dino-local-img-size dino-local-crops-number dino-head-hidden-size "
        "dino-bottleneck-size dino-freeze-last-layer dino-warmup-teacher-temp dino-teacher-temp "
        "dino-warmup-teacher-temp-epochs",
    ),
    _harmless(
        "only distillation (--kd) reads it",
        values=("num-layers-teacher hidden-size-teacher num-attention-heads-teacher kd-alpha-ce kd-beta-ce kd-temp"),
        lists="num-experts-teacher",
    ),
]

_REFUSED = [
    _refused(
        "Muon's iterations have the published coefficients (simple); leave it out",
        values="muon-coefficient-type=simple",
    ),
    _refused(
        "beside Muon, AdamW updates what is no matrix of a layer; leave it out", values="muon-scalar-optimizer=adam"
    ),
    _refused(
        "experts have the whole width of their layer; leave it out",
        values="moe-latent-size",
    ),
    _refused(
        "experts are --num-experts, and the processes that share them --expert-model-parallel-size; use these",
        switches="expert-parallel",
        values="num-experts-switch",
    ),
    _refused(
        "this form of the layer is not available; leave it out",
        switches="apply-residual-connection-post-layernorm",
    ),
    _refused(
        "mixed formats inside the model are not available; use fp32 or bf16 throughout",
        switches="embedding-weights-in-fp32",
    ),
    _refused("the loss is always computed in fp32; leave it out", switches="fp16-lm-cross-entropy"),
    _refused(
        "retrieval-enhanced models are not available; leave it out",
        switches="retro-add-retriever retro-return-doc-ids",
        values="retro-workdir retro-cyclic-train-iters retro-encoder-layers=2 "
        "retro-encoder-hidden-dropout=0.1 retro-encoder-attention-dropout=0.1 "
        "retro-num-neighbors=2 retro-num-retrieved-chunks=2",
    ),
    _refused(
        "the embedding shares the first stage with layers; leave it out",
        switches="standalone-embedding-stage",
    ),
    _refused("initial weights are equal on all replicas; leave it out", switches="data-parallel-random-init"),
    _refused(
        "DeepSpeed's sequence parallelism is not available; use --sequence-parallel with "
        "--tensor-model-parallel-size of at least 2",
        switches="ds-sequence-parallel-fpdt",
        values="ds-sequence-parallel-size=1",
    ),
    _refused(
        "random layer-token dropping is not available; leave it out",
        switches="random-ltd",
    ),
    _refused(
        "of these, only sequences that grow are available; use --curriculum-learning",
        switches="data-efficiency-curriculum-learning",
        values="train-data-exact-num-epochs train-idx-path train-desc-path train-doc-idx-path "
        "train-sample-idx-path train-shuffle-idx-path",
    ),
    _refused("knowledge distillation is not available; leave it out", switches="kd mos", values="load-teacher"),
    _refused(
        "on the command line of pretrain_gpt.py it asks for the losses of checkpoints instead of training; elsewhere "
        "use val_check_gpt.py",
        switches="get-val-ppls",
        program="val_check_gpt.py, and pretrain_gpt.py",
    ),
    _refused("use --finetune, which starts from iteration 0", switches="reset-iteration"),
    _refused("give the local folder to --data-path", values="aml-data-download-path"),
    _refused("every sample is used; leave it out", values="sample-rate=1"),
    _refused("give --train-samples or --train-iters; the model is always built", values="use-dataset-only=false"),
]

_EQUIVALENTS = {
    "n-layer n-layers": "--num-layers",
    "n-head n-heads": "--num-attention-heads",
    "n-embd d-model dim": "--hidden-size",
    "block-size context-length max-seq-len max-seq-length sequence-length": "--seq-length",
    "per-device-train-batch-size per-device-batch-size": "--micro-batch-size",
    "train-batch-size": "--global-batch-size",
    "gradient-accumulation-steps gradient-accumulation": "--global-batch-size, of all micro-batches of a step",
    "max-steps max-iters steps train-steps": "--train-iters",
    "epochs num-train-epochs": "--train-iters or --train-samples",
    "learning-rate": "--lr",
    "min-learning-rate": "--min-lr",
    "lr-scheduler-type": "--lr-decay-style",
    "beta1": "--adam-beta1",
    "beta2": "--adam-beta2",
    "max-grad-norm grad-clip": "--clip-grad",
    "dropout": "--attention-dropout and --hidden-dropout",
    "output-dir out-dir save-dir": "--save",
    "resume resume-from-checkpoint": "--load",
    "save-steps": "--save-interval",
    "eval-steps": "--eval-interval",
    "logging-steps": "--log-interval",
    "tp tp-size": "--tensor-model-parallel-size",
    "pp pp-size": "--pipeline-model-parallel-size",
    "ep ep-size": "--expert-model-parallel-size",
    "dp dp-size data-parallel-size": "the number of processes over those of a replica: leave it out",
    "activation-checkpointing gradient-checkpointing": "--recompute-granularity full --recompute-method uniform",
    "dtype": "--bf16 or --fp16",
}
"""Flag in other families of trainers -> equivalent flag here."""

_RENAMED = [_refused(f"here it is {ours}", lists=names) for names, ours in _EQUIVALENTS.items()]


KNOWN_FLAGS: tuple[KnownFlag, ...] = (
    *(flag for group in (*_HARMLESS, *_REFUSED, *_RENAMED) for flag in group),
    *MEGATRON_LM_FLAGS,
    *NOT_OFFERED,
)

RETIRED_FIELDS: dict[str, object] = {
    "training.use_flash_attn": False,
    "training.empty_unused_memory_level": 0,
    "checkpoint.no_save_rng": False,
    "checkpoint.no_load_rng": False,
    "checkpoint.universal_checkpoint": False,
    "parallel.gradient_accumulation_fusion": True,
    "logging.log_memory_to_tensorboard": False,
}
"""Fields that earlier versions saved in their configurations, and their defaults. None ever had an effect."""
