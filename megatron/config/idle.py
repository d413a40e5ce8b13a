"""Notes on explicit settings without effect, so that no flag is silently ignored.

Settings that would silently change the training are refused elsewhere; these change nothing, which may surprise the
user. Every field of a run is listed here, always has an effect, or declares `no_effect`; tests/unit/config/test_idle.py
checks all fields.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from megatron.base.option import field_options
from megatron.config.idle_experts import EXPERT_RULES
from megatron.config.idle_logs import LOG_RULES
from megatron.config.idle_rule import Idle, fields_of
from megatron.config.run import RunConfig, run_sections
from megatron.config.training import why_not_compiled


def _decays(config: RunConfig) -> bool:
    return config.optimizer.lr_decay_style != "constant"


def _constant(config: RunConfig, world_size: int) -> bool:
    return not _decays(config)


def _resumes(config: RunConfig) -> bool:
    return config.checkpoint.load is not None and not config.checkpoint.finetune


def _one_replica(config: RunConfig, world_size: int) -> bool:
    return config.data_parallel_size(world_size) == 1


def _fixed_gelu(config: RunConfig, world_size: int) -> bool:
    model = config.model
    return model.gated or model.squared_relu or model.openai_gelu or not model.add_bias_linear


def _no_curriculum_by(*kinds: str) -> Callable[[RunConfig, int], bool]:
    return lambda config, world_size: (
        not (config.curriculum.curriculum_learning and config.curriculum.curriculum_type in kinds)
    )


def _curriculum_by(*kinds: str) -> Callable[[RunConfig, int], bool]:
    return lambda config, world_size: config.curriculum.curriculum_type in kinds


def _tokenizer_is_not(*kinds: str) -> Callable[[RunConfig, int], bool]:
    return lambda config, world_size: config.tokenizer.tokenizer_type not in kinds


def _forward_codec(config: RunConfig) -> bool:
    points = [spec.partition("=")[0].strip().lower() for spec in config.compression.compress]
    forward = ("pp-forward", "tp-forward", "ep-dispatch", "ep-combine", "experts")
    return any(point.startswith(forward) and not point.endswith("-backward") for point in points)


RULES: Sequence[Idle] = (
    Idle(
        ("model.rotary_base",),
        lambda config, _: config.model.position_embedding_type != "rope",
        "without --position-embedding-type rope",
    ),
    Idle(
        ("model.final_logit_softcapping",),
        lambda config, _: not config.model.predicts_words,
        "beside a task, whose outputs are no words",
    ),
    *EXPERT_RULES,
    Idle(("model.bias_gelu_fusion",), _fixed_gelu, "beside another activation or --disable-bias-linear"),
    Idle(
        ("model.openai_gelu",),
        lambda config, _: config.model.bias_gelu_fusion and config.model.add_bias_linear,
        "GELU has its tanh form anyway, but with --no-bias-gelu-fusion or --disable-bias-linear",
    ),
    Idle(
        fields_of("data", "mask_prob short_seq_prob"),
        lambda config, _: not config.model.predicts_words,
        "beside a task, which masks no words",
    ),
    Idle(("model.bert_binary_head",), lambda config, _: config.model.model_type != "bert", "only BERT has that head"),
    Idle(
        fields_of("model", "position_buckets max_relative_positions conv_kernel_size"),
        lambda config, _: config.model.model_type != "deberta",
        "only DeBERTa has distances and a convolution",
    ),
    Idle(
        fields_of("data", "mask_prob short_seq_prob"),
        lambda config, _: config.model.causal,
        "only BERT and T5 mask words",
    ),
    Idle(
        (*fields_of("model", "decoder_num_layers decoder_seq_length"), "parallel.pipeline_model_parallel_split_rank"),
        lambda config, _: config.model.model_type != "t5",
        "only T5 has a decoder beside an encoder",
    ),
    Idle(
        ("parallel.pipeline_model_parallel_split_rank",),
        lambda config, _: config.model.model_type == "t5" and config.parallel.pipeline_model_parallel_size == 1,
        "T5's encoder and decoder share the one pipeline stage",
    ),
    Idle(
        fields_of("data", "reset_position_ids reset_attention_mask eod_mask_loss"),
        lambda config, _: not config.model.causal,
        "a sample of BERT or T5 does not go over the end of a document",
    ),
    Idle(
        ("model.init_method_std",),
        lambda config, _: config.model.init_method_xavier_uniform,
        "beside --init-method-xavier-uniform",
    ),
    Idle(
        ("parallel.pipeline_schedule",),
        lambda config, _: config.parallel.pipeline_model_parallel_size == 1,
        "there is one pipeline stage",
    ),
    Idle(
        ("parallel.scatter_gather_tensors_in_pipeline",),
        lambda config, _: (
            config.parallel.tensor_model_parallel_size == 1 or config.parallel.pipeline_model_parallel_size == 1
        ),
        "there is one tensor-parallel rank, or one pipeline stage",
    ),
    Idle(
        ("parallel.scatter_gather_tensors_in_pipeline",),
        lambda config, _: config.parallel.sequence_parallel,
        "beside --sequence-parallel, under which a rank holds only a part of a message",
    ),
    Idle(
        ("parallel.async_tensor_model_parallel_allreduce",),
        lambda config, _: config.parallel.tensor_model_parallel_size == 1,
        "there is one tensor-parallel rank",
    ),
    Idle(
        fields_of("parallel", "overlap_grad_reduce no_allreduce use_distributed_optimizer"),
        _one_replica,
        "there is one replica",
    ),
    Idle(
        ("islands.islands_timeout_seconds", "islands.islands_linger_seconds"),
        lambda config, _: not config.islands.several,
        "there is one island",
    ),
    Idle(
        fields_of("parallel", "overlap_grad_reduce ddp_bucket_size"),
        lambda config, _: config.parallel.ddp_impl == "torch",
        "beside --DDP-impl torch, which has its own",
    ),
    Idle(
        ("parallel.accumulate_allreduce_grads_in_fp32", "model.fp32_residual_connection"),
        lambda config, _: not (config.precision.fp16 or config.precision.bf16),
        "this is fp32 anyway, but with --fp16 or --bf16",
    ),
    Idle(
        ("parallel.distributed_timeout_minutes", "parallel.peer_timeout_seconds", "training.check_replicas"),
        lambda _, world_size: world_size == 1,
        "there is one process",
    ),
    Idle(
        ("training.compile",),
        lambda config, _: (
            config.training.compile == "off"
            and (
                config.parallel.distributed_backend != "nccl"
                or why_not_compiled(config.training, config.parallel, config.model) is not None
            )
        ),
        "layers are compiled by themselves only on CUDA, with one tensor-parallel rank",
    ),
    Idle(
        fields_of("curriculum", "curriculum_type curriculum_seqlen_min curriculum_seqlen_step curriculum_seqlen_steps"),
        lambda config, _: not config.curriculum.curriculum_learning,
        "without --curriculum-learning",
    ),
    Idle(
        ("curriculum.curriculum_root_degree",),
        _no_curriculum_by("fixed_root"),
        "without --curriculum-learning by --curriculum-type fixed_root",
    ),
    Idle(
        fields_of("curriculum", "curriculum_discrete_seqlens curriculum_discrete_steps"),
        _no_curriculum_by("fixed_discrete"),
        "without --curriculum-learning by --curriculum-type fixed_discrete",
    ),
    Idle(
        ("curriculum.curriculum_function",),
        _no_curriculum_by("custom"),
        "without --curriculum-learning by --curriculum-type custom",
    ),
    Idle(
        fields_of("curriculum", "curriculum_seqlen_min curriculum_seqlen_step"),
        _curriculum_by("fixed_discrete", "custom"),
        "beside --curriculum-type fixed_discrete and custom, which have lengths of their own",
    ),
    Idle(
        ("curriculum.curriculum_seqlen_steps",),
        _curriculum_by("fixed_discrete"),
        "beside --curriculum-type fixed_discrete, which has steps of its own",
    ),
    Idle(
        fields_of("precision", "initial_loss_scale min_loss_scale loss_scale_window hysteresis"),
        lambda config, _: not config.precision.fp16,
        "without --fp16",
    ),
    Idle(
        fields_of("precision", "initial_loss_scale min_loss_scale loss_scale_window hysteresis"),
        lambda config, _: config.precision.loss_scale is not None,
        "beside a constant --loss-scale",
    ),
    Idle(
        fields_of("optimizer", "adam_beta1 adam_beta2 adam_eps"),
        lambda config, _: config.optimizer.optimizer not in ("adam", "muon"),
        "without --optimizer adam or muon",
    ),
    Idle(("optimizer.use_apex",), lambda config, _: config.optimizer.optimizer != "adam", "without --optimizer adam"),
    Idle(
        fields_of(
            "optimizer",
            "muon_momentum muon_nesterov muon_num_ns_steps muon_scale_mode muon_extra_scale_factor muon_split_qkv "
            "muon_fp32_matmul_prec",
        ),
        lambda config, _: config.optimizer.optimizer != "muon",
        "without --optimizer muon",
    ),
    Idle(
        fields_of("optimizer", "lamb_beta1 lamb_beta2 lamb_eps"),
        lambda config, _: config.optimizer.optimizer != "lamb",
        "without --optimizer lamb",
    ),
    Idle(
        ("optimizer.sgd_momentum",),
        lambda config, _: config.optimizer.optimizer != "sgd",
        "without --optimizer sgd",
    ),
    Idle(
        fields_of("optimizer", "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples"),
        lambda config, _: config.optimizer.lr_decay_style != "WSD",
        "without --lr-decay-style WSD",
    ),
    Idle(
        ("optimizer.lr_warmup_init",),
        lambda config, _: not config.optimizer.warms_up,
        "there is no warm-up (--lr-warmup-iters and the like)",
    ),
    Idle(("optimizer.min_lr", "optimizer.decoupled_min_lr"), _constant, "with --lr-decay-style constant"),
    Idle(
        fields_of("optimizer", "lr_decay_iters lr_decay_samples lr_decay_tokens"),
        lambda config, _: not _decays(config) and config.optimizer.lr_warmup_fraction is None,
        "with --lr-decay-style constant",
    ),
    Idle(
        ("optimizer.weight_decay",),
        lambda config, _: config.optimizer.weight_decay_incr_style != "constant",
        "beside --start-weight-decay and --end-weight-decay",
    ),
    Idle(
        fields_of(
            "optimizer",
            "override_opt_param_scheduler use_checkpoint_opt_param_scheduler use_new_lr use_new_min_lr",
        ),
        lambda config, _: not _resumes(config) or config.checkpoint.no_load_lr_state,
        "no schedule is loaded (--load without --finetune and --no-load-lr-state does that)",
    ),
    Idle(
        fields_of("checkpoint", "no_load_optim no_load_lr_state"),
        lambda config, _: not _resumes(config),
        "nothing of it is loaded anyway (--load without --finetune does that)",
    ),
    Idle(
        ("data.split",),
        lambda config, _: not (config.data.data_path or config.data.mock_data),
        "without --data-path or --mock-data",
    ),
    Idle(
        fields_of("tokenizer", "vocab_file"),
        _tokenizer_is_not("GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase"),
        "only --tokenizer-type GPT2BPETokenizer and BertWordPiece... read it",
    ),
    Idle(
        fields_of("tokenizer", "merge_file"),
        _tokenizer_is_not("GPT2BPETokenizer"),
        "only --tokenizer-type GPT2BPETokenizer reads it",
    ),
    Idle(
        fields_of("tokenizer", "tokenizer_model"),
        _tokenizer_is_not(
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "HFTokenizer",
            "HuggingFaceTokenizer",
        ),
        "only --tokenizer-type SentencePieceTokenizer and HFTokenizer read it",
    ),
    Idle(
        fields_of("tokenizer", "vocab_extra_ids"),
        _tokenizer_is_not(
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
        ),
        "only --tokenizer-type SentencePieceTokenizer and BertWordPiece... have such tokens",
    ),
    Idle(
        ("checkpoint.overwrite_checkpoints",),
        lambda config, _: _resumes(config) and config.checkpoint.saves_where_it_loads,
        "--load goes on from the checkpoints of --save",
    ),
    *LOG_RULES,
    Idle(
        ("validation.eval_interval",),
        lambda config, _: config.validation.eval_iters == 0 or config.validation.skip_train,
        "nothing is evaluated during training",
    ),
    Idle(
        ("data.multiple_validation_sets", *fields_of("validation", "full_validation fixed_validation eval_at_start")),
        lambda config, _: config.validation.eval_iters == 0,
        "--eval-iters 0 turns evaluation off",
    ),
    Idle(
        ("validation.eval_at_start",),
        lambda config, _: config.validation.skip_train,
        "there is no first step",
    ),
    Idle(
        ("validation.fixed_validation",),
        lambda config, _: config.validation.full_validation,
        "--full-validation reads all samples each time",
    ),
    Idle(
        ("compression.eval_compressed",),
        lambda config, _: not _forward_codec(config),
        "without a compressor of what goes forward",
    ),
    Idle(
        ("compression.compress_module",),
        lambda config, _: not config.compression.compress,
        "without --compress",
    ),
)


def idle_notes(given: RunConfig, resolved: RunConfig, explicit: Collection[str], world_size: int) -> list[str]:
    """Notes on explicit flags without effect, grouped by reason.

    Args:
        given: the unresolved configuration.
        resolved: the resolved configuration.
        explicit: dotted names of the fields set by flags and files; a field set to its default is not reported.
        world_size: number of processes.
    """
    options = {field.path: field for section, cls in run_sections().items() for field in field_options(section, cls)}
    reported: set[str] = set()
    lines = []
    for rule in RULES:
        flags = []
        for path in rule.fields:
            section, _, name = path.partition(".")
            is_requested = path in explicit and getattr(getattr(given, section), name) != options[path].default
            if is_requested and path not in reported and rule.holds(resolved, world_size):
                reported.add(path)
                flags.append(f"--{options[path].flag}")
        if flags:
            comma = "" if rule.why.startswith(("without", "with ", "beside")) else ","
            lines.append(f"{', '.join(flags)}: no effect{comma} {rule.why}")
    return lines
