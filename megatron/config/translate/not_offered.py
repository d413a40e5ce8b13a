"""Features of current Megatron-LM that are not offered, with their flags and alternatives."""

from __future__ import annotations

from megatron.config.translate.rules import KnownFlag, known_flags


def _not_offered(feature: str, instead: str, *, options: str = "", **flags: str) -> list[KnownFlag]:
    """Build the flags of a feature that is not offered.

    Args:
        feature: its name.
        instead: an imperative clause: the equivalent here.
        options: flags with a value that only this feature uses; they have no effect.
        flags: flags that ask for the feature, as for `known_flags`; they are refused.
    """
    return [
        *known_flags(f"{feature}: not offered; {instead}", refused=True, feature=feature, **flags),
        *known_flags(f"read only for {feature}, which is not offered", refused=False, values=options),
    ]


_FEATURES = [
    _not_offered(
        "context parallelism",
        "for long sequences use --sequence-parallel and --recompute-granularity",
        switches="hybrid-context-parallel",
        values="context-parallel-size=1 max-seqlen-per-dp-cp-rank",
        lists="hierarchical-context-parallel-sizes cp-comm-type=p2p",
    ),
    _not_offered(
        "fully sharded data parallelism (FSDP)",
        "use --use-distributed-optimizer, which shards the optimizer's state",
        switches="use-megatron-fsdp use-torch-fsdp2 fsdp-double-buffer fsdp-manual-registration "
        "megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-max-pool-double-buffer "
        "fsdp-db-use-persist-buf-on-alloc-fail enable-full-sharding-in-hsdp torch-fsdp2-no-reshard-after-forward "
        "no-strict-fsdp-dtensor-load disable-strict-fsdp-dtensor-load create-all-gather-group keep-fp8-transpose-cache",
        values="outer-dp-sharding-strategy=no_shard num-distributed-optimizer-instances=1",
        options="data-parallel-sharding-strategy suggested-communication-unit-size megatron-fsdp-version "
        "megatron-fsdp-main-params-dtype megatron-fsdp-main-grads-dtype megatron-fsdp-grad-comm-dtype",
    ),
    _not_offered(
        "weights sharded beside tensor parallelism (GTP)",
        "use --tensor-model-parallel-size alone",
        switches="gtp-remat-reduce-scatter-with-fp32-accumulation gtp-remat-nccl-ub gtp-expert-remat-nccl-ub",
        values="tensor-parallel-num-weight-shards=1 expert-tensor-parallel-num-weight-shards=1",
        lists="gtp-remat-opt-in-modules",
    ),
    _not_offered(
        "multi-latent attention (MLA)",
        "use --num-query-groups for smaller keys and values",
        switches="multi-latent-attention cache-mla-latents mla-down-proj-fusion",
        options="q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim mscale mscale-all-dim rope-type",
    ),
    _not_offered(
        "multi-token prediction (MTP)",
        "leave it out: the loss is that of the next token",
        switches="mtp-standalone mtp-use-repeated-layer mtp-detach-heads mtp-hsm",
        values="mtp-num-layers=0 mtp-hybrid-override-pattern",
        options="mtp-loss-scaling-factor",
    ),
    _not_offered(
        "sparse and linear attention",
        "leave it out: attention is full, or --sliding-window",
        switches="dsa-indexer-use-sparse-loss dsa-indexer-rope-interleaved no-dsa-indexer-rotate-activation "
        "disable-dsa-indexer-rotate-activation no-dsa-indexer-scoring-relu disable-dsa-indexer-scoring-relu "
        "dsa-indexer-k-norm-fp32",
        values="experimental-attention-variant linear-attention-freq dsa-kernel-backend=none",
        options="dsa-indexer-n-heads dsa-indexer-head-dim dsa-indexer-topk dsa-indexer-topk-freq "
        "dsa-indexer-skip-topk-offset dsa-indexer-loss-coeff dsa-indexer-k-norm-epsilon linear-conv-kernel-dim "
        "linear-key-head-dim linear-value-head-dim linear-num-key-heads linear-num-value-heads",
    ),
    _not_offered(
        "state-space and hybrid models (Mamba)",
        "leave it out: every layer is a transformer layer",
        switches="is-hybrid-model disable-mamba-mem-eff-path gdp-cutedsl-kernel",
        values="hybrid-layer-pattern hybrid-override-pattern",
        options="mamba-state-dim mamba-head-dim mamba-num-groups mamba-num-heads gdp-num-householder "
        "gdp-num-chunk-states-to-recompute mamba-training-ssm-states-dtype mamba-inference-conv-states-dtype "
        "mamba-inference-ssm-states-dtype",
    ),
    _not_offered(
        "layers that differ in size, or come from a specification",
        "leave it out: all layers are alike, or experts by --moe-layer-freq",
        values="heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json",
        lists="spec",
    ),
    _not_offered(
        "hyper-connections (mHC)",
        "leave it out: layers have one residual stream",
        switches="enable-mhc-connections",
        options="mhc-num-residual-streams mhc-sinkhorn-iterations mhc-init-gating-factor mhc-recompute-layer-num",
    ),
    _not_offered(
        "maximal update parameterization (muP)",
        "leave it out and tune --lr for the width",
        switches="use-mup",
        options="mup-width-mult mup-base-hidden-size mup-embedding-mult mup-output-mult mup-base-head-dim "
        "mup-attn-scale-power",
    ),
    _not_offered(
        "4-bit products (FP4)",
        "use --fp8 tensorwise or rowwise",
        switches="fp4-param-gather",
        values="fp4-format fp4-quantizer-factory",
        options="fp4-recipe",
    ),
    _not_offered(
        "reinforcement learning",
        "leave it out: only pretraining and fine-tuning run here",
        switches="perform-rl-step grpo-filter-groups-with-same-reward rl-durable-rollout-bank "
        "rl-offload-optimizer-during-inference rl-persist-cuda-graphs no-rl-persist-cuda-graphs rl-partial-rollouts "
        "no-rl-partial-rollouts rl-inference-logprobs-is-correction no-rl-inference-logprobs-is-correction "
        "rl-use-sequence-packing no-rl-use-sequence-packing rl-training-cuda-graphs no-rl-training-cuda-graphs "
        "rl-offload-inference-model-weights-when-idle no-rl-offload-inference-model-weights-when-idle "
        "rl-verify-model-weights-swap no-rl-verify-model-weights-swap rl-skip-bos-token no-rl-skip-bos-token "
        "rl-profile",
        options="rl-prompts-per-eval grpo-prompts-per-step grpo-group-size rl-generation-lag rl-max-inflight-requests "
        "rl-submission-granularity rl-consumption-granularity rl-rollout-bank-dir rl-rollout-bank-max-bytes "
        "grpo-iterations grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-kl-beta grpo-entropy-term-weight "
        "langrl-env-config rl-default-temperature rl-default-top-p rl-default-top-k rl-kv-cache-management-mode "
        "rl-importance-sampling-truncation-coef rl-sequence-packing-max-sequences-per-bin rl-sequence-packing-algo "
        "rl-inference-tensor-model-parallel-size rl-inference-pipeline-model-parallel-size "
        "rl-inference-expert-model-parallel-size rl-inference-expert-tensor-model-parallel-size "
        "rl-inference-model-unified-memory-level refit-method rl-profile-dir",
        lists="rl-inference-parsers",
    ),
    _not_offered(
        "supervised fine-tuning on conversations",
        "use tasks/main.py, or --finetune on text",
        switches="sft",
        options="sft-tokenizer-prompt-format",
    ),
    _not_offered(
        "fill-in-the-middle data",
        "leave it out: samples are read as they are",
        switches="fim-data",
        options="fim-rate fim-spm-rate fim-split-sample fim-fragment-rate fim-no-prefix fim-prefix-token "
        "fim-middle-token fim-suffix-token fim-pad-token fim-eod-token",
    ),
    _not_offered(
        "distillation from saved logits",
        "leave it out",
        switches="logits-load-ignore-errors",
        values="logits-save-dir logits-load-dir",
        options="logits-save-top-k logits-save-top-p logits-save-top-p-min-k logits-save-dtype "
        "logits-load-decode-threads logits-load-prefetch-factor logits-load-msc-prefetch-depth "
        "logits-load-kd-loss-alpha",
    ),
    _not_offered(
        "offloading to the CPU's memory",
        "use --recompute-granularity, or --use-distributed-optimizer",
        switches="optimizer-cpu-offload use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d "
        "no-pin-cpu-grads no-pin-cpu-params fine-grained-activation-offloading "
        "cpu-offloading-retain-pinned-cpu-buffers "
        "delay-offload-until-cuda-graph moe-paged-stash",
        values="cpu-offloading-num-layers=0",
        lists="offload-modules",
        options="optimizer-offload-fraction min-offloaded-tensor-size delta-offload-bytes-across-pp-ranks "
        "activation-offload-fraction fine-grained-offloading-max-inflight-offloads moe-paged-stash-page-size "
        "moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-buffer-size-factor-cpu",
    ),
    _not_offered(
        "stages with unequal numbers of layers",
        "leave it out: --num-layers is divided equally over the stages",
        switches="account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split",
        values="decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers pipeline-model-parallel-layout",
    ),
    _not_offered(
        "optimizer state in few bits",
        "leave it out: it is kept in fp32",
        switches="use-precision-aware-optimizer",
        values="main-grads-dtype=fp32 main-params-dtype=fp32 exp-avg-dtype=fp32 exp-avg-sq-dtype=fp32",
    ),
    _not_offered(
        "other forms of attention and of the layer",
        "leave it out",
        switches="qk-l2-norm qk-clip attention-output-gate rotary-interleaved quick-geglu use-kitchen-attention "
        "moe-apply-probs-on-input freeze-all-layers apply-wd-to-qk-layernorm",
        values="softmax-type=vanilla glu-linear-offset=0 activation-func-clamp-value no-rope-freq output-logit-dtype "
        "embedding-init-method-std moe-router-force-biased moe-router-quantile-balancing-ema=0 "
        "no-weight-decay-cond-type",
        options="qk-clip-alpha qk-clip-threshold relative-attention-num-buckets relative-attention-max-distance "
        "kitchen-attention-backend",
        lists="mrope-section",
    ),
    _not_offered(
        "the optimizer Lion",
        "use --optimizer adam, sgd, lamb or muon",
        options="lion-beta1 lion-beta2",
    ),
    _not_offered(
        "restarts inside a process",
        "use tools/launch.py --max-restarts N, which resumes from the last checkpoint",
        switches="inprocess-restart enable-ft-package",
        options="inprocess-max-iterations inprocess-monitor-thread-interval inprocess-monitor-process-interval "
        "inprocess-progress-watchdog-interval inprocess-heartbeat-interval inprocess-soft-timeout "
        "inprocess-hard-timeout "
        "inprocess-heartbeat-timeout inprocess-barrier-timeout inprocess-completion-timeout inprocess-last-call-wait "
        "inprocess-termination-grace-time inprocess-granularity inprocess-active-world-size ft-num-warmup-iters",
    ),
    _not_offered(
        "injected faults",
        "leave it out",
        values="error-injection-rate=0 fault-injector-ranks fault-injector-num-ranks fault-injector-fault-types",
        options="error-injection-type fault-injector-fault-probabilities fault-injector-fault-delay "
        "fault-injector-delay-start-iteration fault-injector-mtti-seconds fault-injector-offset-seconds "
        "fault-injector-seed",
    ),
    _not_offered(
        "checkpoints in memory or on each node's disk",
        "use --save-interval with --async-save",
        switches="replication",
        values="non-persistent-save-interval non-persistent-ckpt-type",
        options="non-persistent-global-ckpt-dir non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo "
        "replication-jump replication-factor",
    ),
]

NOT_OFFERED: tuple[KnownFlag, ...] = tuple(flag for group in _FEATURES for flag in group)
