"""Flags of current Megatron-LM that set nothing here, with the equivalent or the reason.

Flags of unavailable features are in `not_offered`; flags shared with older systems are in `known`.
"""

from __future__ import annotations

from functools import partial

from megatron.config.translate.rules import KnownFlag, known_flags

_harmless = partial(known_flags, refused=False)
_refused = partial(known_flags, refused=True)


_REFUSED = [
    _refused(
        "a run is never changed without a word; choose --global-batch-size for this layout",
        switches="decrease-batch-size-if-needed",
    ),
    _refused("give --config FILE.yaml", values="yaml-cfg"),
    _refused("give the data sets to --data-path", values="data-args-path per-split-data-args-path"),
    _refused("no such list is read; leave it out", values="per-dataset-sequences-path phase-transition-iterations"),
    _refused("evaluation has the batch sizes of training", values="eval-global-batch-size eval-micro-batch-size"),
    _refused("every evaluation runs; choose --eval-interval", values="start-eval-at-iter=0"),
    _refused("give --vocab-size, the number of entries", values="padded-vocab-size"),
    _refused(
        "ranks have groups of all orders that they need; leave it out",
        switches="use-tp-pp-dp-mapping fake-process-group",
    ),
    _refused("use --ckpt-step N", values="override-ckpt-iteration"),
    _refused("use --save-interval with --keep-last", values="save-retain-interval persistent-save-interval"),
    _refused(
        "tensors are not written while training; use --log-gradients",
        values="save-params-interval save-activations-interval save-wgrads-interval save-dgrads-interval "
        "save-tokens-per-expert-interval dump-param-to-param-group-map",
    ),
    _refused(
        "use --recompute-granularity selective, which recomputes attention, or full",
        switches="moe-layer-recompute",
        lists="recompute-modules=core_attn",
    ),
    _refused("use --iterations-to-skip", values="result-rejected-tracker-filename"),
    _refused(
        "what experts exchange is compressed by --compress ep-dispatch=... and ep-combine=...; use that",
        values="moe-dispatch-fwd-dtype=bf16 moe-combine-bwd-dtype=bf16",
    ),
    _refused("use --fp8 rowwise, which computes weight gradients in bf16", switches="disable-fp8-wgrad"),
    _refused(
        "torch decides in which precision products are summed; leave it out",
        switches="disable-bf16-reduced-precision-matmul",
    ),
    _refused("tokens that pad a sample never count; leave it out", switches="allow-ambiguous-pad-tokens"),
    _refused("copies of experts are whole; leave it out", values="moe-upcycling-granularity=1"),
    _refused(
        "use --fp8 tensorwise or rowwise",
        values="fp8-quantizer-factory te-precision-config-file fp8-recipe=delayed",
        switches="fp8-output-proj first-last-layers-bf16 fp8-param-gather",
    ),
    _refused(
        "a test of the router that changes what is trained; leave it out",
        switches="moe-router-force-load-balancing moe-enable-routing-replay",
    ),
    _refused(
        "use --moe-expert-capacity-factor",
        values="moe-expert-rank-capacity-factor",
    ),
    _refused("attention within documents is --reset-attention-mask", switches="dataloader-inter-document-masking"),
    _refused(
        "tokenizers come from their folder; see --tokenizer-type and --tokenizer-model",
        values="tokenizer-metadata tiktoken-pattern chat-template",
        lists="tokenizer-special-tokens",
        switches="tokenizer-sentencepiece-legacy tokenizer-hf-no-use-fast tokenizer-hf-no-include-special-tokens "
        "no-tokenizer-sentencepiece-ignore-extra-whitespaces "
        "disable-tokenizer-sentencepiece-ignore-extra-whitespaces",
    ),
    _refused("use --sliding-window N, which counts the token itself", values="window-size"),
    _refused("validation sets are named by their paths; leave it out", lists="validation-set-names"),
    _refused("NullTokenizer's end of document is its last entry; leave it out", values="null-tokenizer-eod-id"),
    _refused(
        "SIGTERM is awaited, and SIGUSR1; see --exit-signal-handler, and leave it out",
        values="exit-signal=SIGTERM|TERM|15",
    ),
    _refused(
        "a run goes on after the samples that it has consumed; use --finetune to begin other data with its weights",
        values="override-dataloader-consumed-samples",
    ),
]

_HARMLESS = [
    _harmless(
        "gradients are always means over the tokens that count in the global batch",
        switches="calculate-per-token-loss",
    ),
    _harmless(
        "the loss is always fused with the output layer, by chunks of tokens",
        switches="cross-entropy-loss-fusion",
        values="cross-entropy-fusion-impl",
    ),
    _harmless("Python collects garbage as it does", switches="manual-gc no-manual-gc-eval disable-manual-gc-eval"),
    _harmless("Python collects garbage as it does", values="manual-gc-interval"),
    _harmless(
        "--deterministic-mode makes runs repeatable to the last digit, and --check-replicas N compares replicas",
        switches="check-for-large-grads log-straggler disable-straggler-on-startup",
        values="rerun-mode check-weight-hash-across-dp-replicas-interval "
        "gpu-sniff-test-interval straggler-ctrlr-port straggler-minmax-count",
    ),
    _harmless(
        "there is no such fused kernel or library to turn on or off; the numbers are the same",
        switches="no-tp-comm-bulk-wgrad disable-tp-comm-bulk-wgrad no-tp-comm-bulk-dgrad disable-tp-comm-bulk-dgrad "
        "no-tp-comm-overlap-ag disable-tp-comm-overlap-ag no-tp-comm-overlap-rs disable-tp-comm-overlap-rs "
        "tp-comm-overlap-rs-dgrad no-tp-comm-split-ag disable-tp-comm-split-ag no-tp-comm-split-rs "
        "disable-tp-comm-split-rs use-fused-weighted-squared-relu "
        "fused-residual-rmsnorm use-transformer-engine-op-fuser use-te-activation-func disable-jit-fuser "
        "moe-router-fusion no-gradient-reduce-div-fusion muon-use-syrk te-rng-tracker inference-rng-tracker "
        "optimizer-cuda-graph batch-invariant-mode enable-experimental",
        values="tp-comm-bootstrap-backend tp-comm-overlap-cfg flash-attention-version batch-invariant-backend "
        "symmetric-ar-type mlp-chunks-for-training",
    ),
    _harmless(
        "GPUs run training without CUDA graphs; the numbers are the same",
        switches="enable-cuda-graph external-cuda-graph",
        values="cuda-graph-impl cuda-graph-warmup-steps",
        lists="cuda-graph-scope cuda-graph-modules",
    ),
    _harmless(
        "weight gradients are computed in the backward pass; only time differs",
        switches="delay-wgrad-compute overlap-dispatch-backward-with-experts-wgrad defer-embedding-wgrad-compute "
        "ep-overlap-early-attn-memory-release overlap-p2p-communication-warmup-flush",
        values="wgrad-deferral-limit microbatch-group-size-per-virtual-pipeline-stage",
    ),
    _harmless(
        "experts' products are grouped, and tokens go by all-to-alls; only time differs",
        switches="moe-shared-expert-overlap use-grouped-gemm-for-shared-expert use-grouped-gemm-for-dense-mlp "
        "moe-use-grouped-tensor moe-single-grouped-weight moe-single-grouped-bias moe-enable-deepep "
        "moe-permute-fusion-into-hybridep moe-hybridep-pad-uneven-dispatch-inputs moe-ncclep-zero-copy "
        "moe-pad-experts-for-cuda-graph-inference moe-router-padding-for-quantization moe-router-padding-for-fp8 "
        "high-priority-a2a-comm-stream",
        values="moe-shared-expert-glu-interleave-size moe-mlp-glu-interleave-size moe-flex-dispatcher-backend "
        "moe-flex-dispatcher-num-sms moe-deepep-num-sms moe-hybridep-num-sms moe-hybridep-num-blocks-permute "
        "moe-hybridep-num-blocks-unpermute moe-hybridep-num-sms-preprocessing",
    ),
    _harmless(
        "gradient and parameter buffers are contiguous, and are reduced as soon as they are ready",
        switches="no-align-grad-reduce disable-align-grad-reduce no-align-param-gather "
        "ddp-pad-buckets-for-high-nccl-busbw "
        "ddp-reduce-scatter-with-fp32-accumulation ddp-average-in-collective overlap-param-gather-with-optimizer-step "
        "no-use-layer-wise-param-layout reuse-grad-buf-for-mxfp8-param-ag",
        values="ddp-num-buckets",
        lists="ddp-param-name-patterns-for-fp32-local-accumulation",
    ),
    _harmless(
        "process groups are made as they are needed; NCCL is set by its own variables",
        switches="use-nccl-ub disable-symmetric-registration disable-gloo-process-groups use-sharp",
        values="nccl-communicator-config-path sharp-enabled-group pipeline-model-parallel-comm-backend",
        lists="high-priority-stream-groups",
    ),
    _harmless(
        "lost and hanging ranks are found by heartbeats (--peer-timeout-seconds)",
        switches="no-flight-recorder-dump-on-timeout disable-flight-recorder-dump-on-timeout "
        "flight-recorder-include-stack-trace no-flight-recorder-include-only-active "
        "disable-flight-recorder-include-only-active no-flight-recorder-extra-dump-on-exec "
        "disable-flight-recorder-extra-dump-on-exec calc-ft-timeouts run-workload-inspector-server",
        values="distributed-timeout-seconds-after-init flight-recorder-dump-path flight-recorder-trace-buffer-size",
    ),
    _harmless(
        "checkpoints have one format, sharded over all ranks and verified",
        switches="use-mp-args-from-checkpoint-args no-use-tokenizer-model-from-checkpoint-args "
        "disable-use-tokenizer-model-from-checkpoint-args auto-detect-ckpt-format no-ckpt-fully-parallel-save "
        "use-persistent-ckpt-worker async-ckpt-use-cpu-shm ckpt-fully-parallel-load "
        "ckpt-fully-parallel-load-per-rank-objects ckpt-assume-constant-structure ckpt-pg-tensors-cache-create "
        "no-ckpt-load-validate-sharding-integrity disable-ckpt-load-validate-sharding-integrity "
        "dist-ckpt-save-pre-mcore-014 dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient "
        "no-save-tokenizer-assets disable-save-tokenizer-assets verify-integrity use-dist-ckpt "
        "ckpt-fully-parallel-save "
        "ckpt-drop-redundant-extra-state load-main-params-from-ckpt",
        values="async-strategy async-ckpt-cpu-priority async-ckpt-io-priority ckpt-fully-parallel-load-exchange-algo "
        "ckpt-fully-parallel-save-process-group ckpt-fully-parallel-load-process-group ckpt-pg-tensors-cache-path "
        "dist-ckpt-strictness dist-ckpt-workers",
    ),
    _harmless(
        "it converts to the formats of other systems",
        switches="ckpt-convert-update-legacy-dist-opt-format",
        values="ckpt-convert-format ckpt-convert-save",
        program="tools/ckpt_convert.py",
    ),
    _harmless("files are memory-mapped and read on demand", switches="no-mmap-bin-files dataloader-fast-cache-load "),
    _harmless(
        "files are memory-mapped and read on demand",
        switches="dataloader-defer-npy-index-mmap",
        values="num-dataset-builder-threads object-storage-cache-path mid-level-dataset-surplus",
    ),
    _harmless("files are local", switches="enable-msc disable-msc"),
    _harmless(
        "rows that pad the vocabulary take no part in anything",
        switches="no-pad-vocab-size disable-pad-vocab-size use-gigatoken",
        values="tiktoken-num-special-tokens null-tokenizer-pad-id",
    ),
    _harmless(
        "initial weights do not depend on the device and are always drawn before a checkpoint replaces them",
        switches="init-model-with-meta-device",
    ),
    _harmless(
        "read only with --first-last-layers-bf16, which is refused",
        values="num-layers-at-start-in-bf16 num-layers-at-end-in-bf16",
    ),
    _harmless(
        "see --profile-trace and --timing-log-level for where time goes",
        switches="use-pytorch-profiler pytorch-profiler-collect-shapes pytorch-profiler-collect-callstack "
        "pytorch-profiler-collect-chakra record-memory-history record-shapes nvtx-ranges otel-enabled",
        values="memory-snapshot-path otel-service-name otel-span-groups train-sync-interval config-logger-dir",
    ),
    _harmless(
        "see --log-interval, --log-memory-to-tensorboard and docs/reference/flags.md for what is logged",
        switches="log-progress disable-log-loss-scale-to-tensorboard log-device-memory-used log-max-attention-logit "
        "log-energy moe-routing-trace-capture-logits moe-routing-trace-capture-hidden-states "
        "moe-routing-trace-dump-weights",
        values="log-memory-interval logging-level moe-routing-trace-path moe-routing-trace-max-training-iters",
    ),
    _harmless("W&B reads the variable WANDB_ENTITY", values="wandb-entity"),
    _harmless(
        "a service of one company; the run's own logs are --tensorboard-dir, --wandb-project and --log-json-file",
        switches="no-one-logger one-logger-async",
        values="one-logger-project one-logger-run-name app-tag-run-name app-tag-run-version",
    ),
    _harmless(
        "see --exit-signal-handler", switches="exit-signal-handler-for-dataloader exit-signal-handler-for-training"
    ),
    _harmless("it is for tests of Megatron-LM", switches="test-mode inprocess-empty-cuda-cache"),
    _harmless(
        "the range is rounded unless --no-yarn-correction-range-round-to-int is given",
        switches="yarn-correction-range-round-to-int",
    ),
    _harmless("embeddings are scattered at once", switches="disable-clone-scatter-output-in-embedding"),
    _harmless(
        "only text generation reads it, and that is tools/generate_samples_gpt.py and the server",
        switches="flash-decode nccl-all-reduce-for-prefill inference-fuse-tp-communication "
        "inference-disable-triton-nvls-kernels inference-moe-disable-fused-quant-kernels use-legacy-static-engine "
        "inference-dynamic-batching inference-dynamic-batching-track-paused-request-events "
        "inference-dynamic-batching-track-generated-token-events decode-only-cuda-graphs "
        "inference-cuda-graph-all-prefills enable-chunked-prefill inference-dynamic-batching-prefix-caching "
        "no-inference-dynamic-batching-prefix-caching use-same-sampling-seed-across-dp-ranks "
        "inference-text-gen-server-logging no-inference-text-gen-server-logging inference-wandb-logging "
        "no-inference-wandb-logging inference-use-synchronous-zmq-collectives "
        "no-inference-use-synchronous-zmq-collectives inference-disable-ep-consensus no-inference-disable-ep-consensus",
        values="inference-cuda-graph-scope inference-grouped-gemm-backend inference-moe-token-dispatcher-type "
        "mlp-chunks-for-prefill inference-max-requests inference-max-seq-length "
        "inference-dynamic-batching-buffer-size-gb inference-dynamic-batching-paused-buffer-size-gb "
        "inference-dynamic-batching-mamba-memory-ratio inference-dynamic-batching-block-size "
        "inference-dynamic-batching-max-requests inference-dynamic-batching-max-tokens "
        "inference-dynamic-batching-num-cuda-graphs inference-cuda-graph-max-tokens "
        "inference-dynamic-batching-unified-memory-level num-speculative-tokens "
        "inference-dynamic-batching-prefix-caching-eviction-policy "
        "inference-dynamic-batching-prefix-caching-coordinator-policy "
        "inference-dynamic-batching-prefix-caching-routing-alpha inference-dynamic-batching-prefix-caching-mamba-gb "
        "inference-dynamic-batching-cuda-graph-mixed-prefill-count "
        "inference-dynamic-batching-cuda-graph-sizing-distribution inference-dynamic-batching-sampling-backend "
        "inference-dynamic-batching-async-sched-mode inference-dynamic-batching-logprobs-mode "
        "inference-logging-step-interval inference-coordinator-port inference-shards",
    ),
]

MEGATRON_LM_FLAGS: tuple[KnownFlag, ...] = tuple(flag for group in (*_REFUSED, *_HARMLESS) for flag in group)
