"""The shape of the model and its initialization."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from megatron.base.errors import UserError
from megatron.base.numerals import MOST
from megatron.base.option import derived, is_unset, option, required
from megatron.config.kinds import PROGRAMS, ModelType, TaskHead, kind_text

if TYPE_CHECKING:
    import torch

MOST_LAYERS = 2048
LM_LOSS, SOP_LOSS = "lm loss", "sop loss"
CLASSIFICATION_LOSS, REGRESSION_LOSS = "classification loss", "regression loss"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Network size and form. Sizes are global: they do not depend on the layout."""

    model_type: ModelType = option(  # noqa: RUF009
        "gpt",
        "Kind of model. Each program trains one kind and sets this itself.",
        checkpoint="shape",
    )
    num_layers: int = required(
        "Number of transformer layers.",
        unit="layers",
        minimum=1,
        maximum=MOST_LAYERS,
        aliases=("encoder-num-layers",),
        checkpoint="shape",
    )
    hidden_size: int = required("Width of the residual stream.", minimum=1, maximum=MOST, checkpoint="shape")
    ffn_hidden_size: int = derived(
        "4 * hidden size; with --swiglu, 8/3 * hidden size rounded down to a multiple of 64",
        "Inner width of the MLP.",
        minimum=1,
        maximum=4 * MOST,
        checkpoint="shape",
    )
    num_attention_heads: int = required("Number of query heads.", minimum=1, maximum=MOST, checkpoint="shape")
    num_query_groups: int = derived(
        "one per attention head",
        "Number of key/value heads (grouped-query attention). It must divide --num-attention-heads.",
        minimum=1,
        maximum=MOST,
        aliases=("num-key-value-heads",),
        checkpoint="shape",
    )
    kv_channels: int = derived(
        "hidden size / attention heads", "Width of one attention head.", minimum=1, maximum=MOST, checkpoint="shape"
    )
    seq_length: int = required(
        "Sequence length of the training samples.",
        unit="tokens",
        minimum=1,
        maximum=MOST,
        aliases=("encoder-seq-length",),
        checkpoint="default",
    )
    max_position_embeddings: int = derived(
        "--seq-length",
        "Number of positions that learned position embeddings can name.",
        unit="tokens",
        minimum=1,
        maximum=MOST,
        checkpoint="shape",
    )
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = option(
        "learned_absolute",
        "Kind of position embedding.",
        checkpoint="shape",
    )
    rotary_base: float = option(
        10000.0,
        "Base of the rotary frequencies.",
        above=0,
        aliases=("rotary-position-embeddings-theta",),
        checkpoint="shape",
    )
    rotary_percent: float = option(
        1.0, "Share of each head's channels that is rotated.", above=0, maximum=1, checkpoint="shape"
    )
    rotary_scaling: Literal["none", "linear", "llama3"] = option(
        "none",
        "Scale the rotary wavelengths for sequences longer than those of pretraining: all of them (linear), or "
        "only the long ones (llama3).",
        checkpoint="shape",
    )
    rotary_scaling_factor: float = option(
        8.0,
        "Factor of --rotary-scaling.",
        minimum=1,
        aliases=("rope-scaling-factor",),
        checkpoint="shape",
    )
    rotary_scaling_original_length: int = option(
        8192,
        "With --rotary-scaling llama3: sequence length of pretraining.",
        unit="tokens",
        minimum=1,
        checkpoint="shape",
    )
    rotary_scaling_low_turns: float = option(
        1.0,
        "With --rotary-scaling llama3: wavelengths that turn fewer times in the original length are scaled in full.",
        above=0,
        checkpoint="shape",
    )
    rotary_scaling_high_turns: float = option(
        4.0,
        "With --rotary-scaling llama3: wavelengths that turn more often in the original length are not scaled.",
        above=0,
        checkpoint="shape",
    )
    sliding_window: int | None = derived(
        "all earlier positions",
        "Sliding-window attention: a token attends to this many positions, its own included.",
        unit="tokens",
        minimum=1,
        checkpoint="shape",
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = option("LayerNorm", "Normalization layer.", checkpoint="shape")
    norm_epsilon: float = option(
        1e-5,
        "Epsilon of the normalization layers, added to the variance.",
        above=0,
        aliases=("layernorm-epsilon",),
        checkpoint="shape",
    )
    swiglu: bool = option(False, "Gated MLP: SiLU(gate) * up instead of GELU.", checkpoint="shape")
    openai_gelu: bool = option(False, "GELU in its tanh form.", checkpoint="shape")
    squared_relu: bool = option(False, "Squared ReLU instead of GELU.", checkpoint="shape")
    bias_gelu_fusion: bool = option(
        True,
        "GELU in its exact (erf) form. Without this flag GELU has its tanh form, as in Megatron, wherever "
        "the MLP has a bias.",
        flag="no-bias-gelu-fusion",
        off_switch=True,
        checkpoint="shape",
    )
    untie_embeddings_and_output_weights: bool = option(
        False, "Give the output layer weights of its own.", checkpoint="shape"
    )
    add_bias_linear: bool = option(
        True,
        "No biases in the linear layers.",
        flag="disable-bias-linear",
        off_switch=True,
        checkpoint="shape",
    )
    add_qkv_bias: bool = option(
        False,
        "Biases in the projection to queries, keys and values, where --disable-bias-linear leaves the others out.",
        checkpoint="shape",
    )
    parallel_residual: bool = option(
        False,
        "The MLP of a layer reads the layer's input, beside the attention, instead of what follows the attention.",
        checkpoint="shape",
    )
    bert_binary_head: bool = option(
        True,
        "BERT without the binary head, which says whether two sentences are in order: no sop loss, and no token types.",
        flag="bert-no-binary-head",
        off_switch=True,
        checkpoint="shape",
    )
    num_tokentypes: int = derived(
        "2 for BERT with its binary head, else 0",
        "Number of BERT's token types, each with an embedding: the first sentence has type 0, the second type 1. "
        "Without them (0) both look alike.",
        minimum=0,
        maximum=MOST,
        checkpoint="shape",
    )
    task_head: TaskHead = option(  # noqa: RUF009
        "none",
        "Head that says one thing of a whole sample, instead of its words: its class, a number, or which of several "
        "texts is the right one. Only tasks/main.py trains such models, and sets this itself.",
        checkpoint="shape",
    )
    task_classes: int = option(
        0,
        "Classes of --task-head classification, or texts that --task-head choice chooses from; tasks/main.py sets it.",
        minimum=0,
        maximum=MOST,
        checkpoint="shape",
    )
    fp32_residual_connection: bool = option(
        False,
        "Keep the residual stream in fp32 with --fp16 or --bf16; stages then exchange fp32.",
        checkpoint="default",
    )
    attention_dropout: float = option(0.1, "Dropout probability of the attention weights.", minimum=0, below=1)
    hidden_dropout: float = option(0.1, "Dropout probability of embeddings and residual branches.", minimum=0, below=1)
    init_method_std: float = option(0.02, "Standard deviation of the initial weights.", minimum=0, maximum=1e6)
    init_method_xavier_uniform: bool = option(False, "Draw the initial weights from Xavier's uniform law.")
    make_vocab_size_divisible_by: int = option(
        128,
        "The vocabulary is padded to a multiple of this times the tensor-parallel size.",
        unit="entries",
        minimum=1,
        maximum=MOST,
        checkpoint="default",
    )

    def residual_dtype(self, params_dtype: torch.dtype) -> torch.dtype:
        """Dtype of the residual stream, which pipeline stages exchange; it may differ from that of the parameters."""
        import torch

        return torch.promote_types(params_dtype, torch.float32) if self.fp32_residual_connection else params_dtype

    @property
    def causal(self) -> bool:
        """Whether a token attends to earlier ones alone. Otherwise samples are padded, and each says where."""
        return self.model_type == "gpt"

    @property
    def kind(self) -> str:
        """Its kind, as ``kind_text`` has it."""
        return kind_text(self.model_type, self.task_head, self.task_classes)

    @property
    def predicts_words(self) -> bool:
        """Whether the model is a language model, not one of whole samples."""
        return self.task_head == "none"

    @property
    def ties_embeddings(self) -> bool:
        """Whether the output projection is the embedding's weight."""
        return self.predicts_words and not self.untie_embeddings_and_output_weights

    @property
    def num_outputs(self) -> int:
        """Numbers that a model of whole samples gives for each sequence."""
        return self.task_classes if self.task_head == "classification" else 1

    @property
    def sequences_per_sample(self) -> int:
        """Sequences that one label is for; they are next to each other in a micro-batch."""
        return self.task_classes if self.task_head == "choice" else 1

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Names of the losses that training adds up."""
        if not self.predicts_words:
            return (REGRESSION_LOSS if self.task_head == "regression" else CLASSIFICATION_LOSS,)
        return (LM_LOSS, SOP_LOSS) if self.model_type == "bert" and self.bert_binary_head else (LM_LOSS,)

    @property
    def counts_before(self) -> bool:
        """Whether what counts in a global batch is counted before its first forward pass: where losses are means over
        different things, or over samples."""
        return len(self.loss_names) > 1 or not self.predicts_words

    @property
    def activation(self) -> str:
        """The MLP's activation: "swiglu", "squared_relu", "gelu_tanh" or "gelu" (exact).

        The tanh form is what Megatron's fused bias and GELU computes; without biases there is no such fusion.
        """
        if self.swiglu:
            return "swiglu"
        if self.squared_relu:
            return "squared_relu"
        if self.openai_gelu or (self.bias_gelu_fusion and self.add_bias_linear):
            return "gelu_tanh"
        return "gelu"


def resolve_model(model: ModelConfig) -> ModelConfig:
    """Fills every derived size. Raises UserError where that is impossible."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    if is_unset(model.kv_channels):
        if hidden % heads != 0:
            raise UserError(
                f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}; change one of "
                "them, or give the width of a head with --kv-channels"
            )
        model = replace(model, kv_channels=hidden // heads)
    if is_unset(model.ffn_hidden_size):
        width = 8 * hidden // 3 // 64 * 64 if model.swiglu else 4 * hidden
        if width == 0:
            raise UserError(f"--swiglu: --hidden-size {hidden} is too small for a default; give --ffn-hidden-size")
        model = replace(model, ffn_hidden_size=width)
    if is_unset(model.num_query_groups):
        model = replace(model, num_query_groups=heads)
    if is_unset(model.max_position_embeddings):
        model = replace(model, max_position_embeddings=model.seq_length)
    if is_unset(model.num_tokentypes):
        model = replace(model, num_tokentypes=2 if model.model_type == "bert" and model.bert_binary_head else 0)
    return model


def check_model(model: ModelConfig) -> None:
    """Checks that the model can be built on some layout (else UserError)."""
    if model.num_attention_heads % model.num_query_groups != 0:
        raise UserError(
            f"--num-query-groups {model.num_query_groups} does not divide --num-attention-heads "
            f"{model.num_attention_heads}; choose a divisor"
        )
    if model.position_embedding_type == "learned_absolute" and model.seq_length > model.max_position_embeddings:
        raise UserError(
            f"--seq-length {model.seq_length} is longer than --max-position-embeddings "
            f"{model.max_position_embeddings}; raise the latter to at least the former"
        )
    _check_rotary(model)
    _check_kind(model)
    _check_task_head(model)
    if model.add_qkv_bias and model.add_bias_linear:
        raise UserError(
            "--add-qkv-bias: all linear layers have biases already; leave it out, or add --disable-bias-linear"
        )
    chosen = [
        flag
        for flag, on in (
            ("--swiglu", model.swiglu),
            ("--openai-gelu", model.openai_gelu),
            ("--squared-relu", model.squared_relu),
        )
        if on
    ]
    if len(chosen) > 1:
        raise UserError(f"{' and '.join(chosen)} exclude each other; keep one activation")


def _check_kind(model: ModelConfig) -> None:
    if not model.causal and model.sliding_window is not None:
        raise UserError("--sliding-window is of earlier positions, and BERT attends to later ones, too; leave it out")
    if model.model_type == "bert" and model.num_tokentypes == 1:
        raise UserError("--num-tokentypes 1: the two sentences of a sample have types 0 and 1; give 0 or at least 2")
    if model.model_type != "bert" and model.num_tokentypes:
        raise UserError(
            f"--num-tokentypes {model.num_tokentypes}: only BERT's samples have token types; leave it out, or run "
            f"{PROGRAMS['bert']}"
        )


def _check_task_head(model: ModelConfig) -> None:
    least = 2 if model.task_head in ("classification", "choice") else 0
    if (least == 0 and model.task_classes) or model.task_classes < least:
        raise UserError(
            f"--task-head {model.task_head} with --task-classes {model.task_classes}: classification and choice take "
            "at least 2, and others none; leave both out, and tasks/main.py --task sets them"
        )


def _check_rotary(model: ModelConfig) -> None:
    if model.position_embedding_type != "rope":
        given = "--rotary-percent" if model.rotary_percent != 1.0 else "--rotary-scaling"
        if model.rotary_percent != 1.0 or model.rotary_scaling != "none":
            raise UserError(f"{given} needs rotary positions; add --position-embedding-type rope")
    _check_rotary_scaling(model)
    if model.position_embedding_type != "rope":
        return
    rotated = int(model.kv_channels * model.rotary_percent)
    if rotated < 2 or rotated % 2 != 0:
        raise UserError(
            f"--rotary-percent {model.rotary_percent:g} of {model.kv_channels} channels a head "
            f"(--kv-channels) rotates {rotated} channels; choose values that give an even number of at least "
            "2"
        )


def _check_rotary_scaling(model: ModelConfig) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(model)}
    of_all, of_llama3 = ("factor",), ("original_length", "low_turns", "high_turns")
    needed = {"none": (), "linear": of_all, "llama3": of_all + of_llama3}[model.rotary_scaling]
    for part in of_all + of_llama3:
        name = f"rotary_scaling_{part}"
        if part not in needed and getattr(model, name) != defaults[name]:
            kind = "llama3" if part in of_llama3 else "linear or llama3"
            raise UserError(f"--{name.replace('_', '-')} is for --rotary-scaling {kind}; add it, or leave this out")
    if model.rotary_scaling == "llama3" and model.rotary_scaling_low_turns >= model.rotary_scaling_high_turns:
        raise UserError(
            f"--rotary-scaling-low-turns {model.rotary_scaling_low_turns:g} is not below --rotary-scaling-high-turns "
            f"{model.rotary_scaling_high_turns:g}; lower the former"
        )
