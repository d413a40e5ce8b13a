"""Shape and initialization of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron.base.option import derived, option, required
from megatron.base.parse_numbers import MAX_SIZE
from megatron.config.conditions import HALF_PRECISION, WORDS, unless, when
from megatron.config.experts import ExpertsConfig
from megatron.config.layer_form import LayerFormConfig
from megatron.config.model_types import ModelType, TaskHead, describe_model_type

if TYPE_CHECKING:
    import torch

MAX_LAYERS = 2048
LM_LOSS, SOP_LOSS = "lm loss", "sop loss"
CLASSIFICATION_LOSS, REGRESSION_LOSS = "classification loss", "regression loss"


@dataclass(frozen=True, kw_only=True)
class ModelConfig(LayerFormConfig, ExpertsConfig):
    """Network size and form. Sizes are global: they do not depend on the layout."""

    model_type: ModelType = option(  # noqa: RUF009
        "gpt",
        "Kind of model. Each program trains one kind and sets this itself.",
        checkpoint="shape",
    )
    num_layers: int = required(
        "Number of transformer layers; for T5, of the encoder.",
        unit="layers",
        minimum=1,
        maximum=MAX_LAYERS,
        aliases=("encoder-num-layers",),
        checkpoint="shape",
        common="model size",
    )
    decoder_num_layers: int | None = derived(
        "--num-layers for T5",
        "Number of layers of T5's decoder.",
        unit="layers",
        minimum=1,
        maximum=MAX_LAYERS,
        checkpoint="shape",
        only_if=(when("model.model_type", "t5"),),
    )
    hidden_size: int = required(
        "Width of the residual stream.", minimum=1, maximum=MAX_SIZE, checkpoint="shape", common="model size"
    )
    ffn_hidden_size: int = derived(
        "4 * hidden size; with --swiglu or --geglu, 8/3 * hidden size rounded down to a multiple of 64",
        "Inner width of the MLP.",
        minimum=1,
        maximum=4 * MAX_SIZE,
        checkpoint="shape",
        common="model size",
    )
    num_attention_heads: int = required(
        "Number of query heads.", minimum=1, maximum=MAX_SIZE, checkpoint="shape", common="model size"
    )
    num_query_groups: int = derived(
        "one per attention head",
        "Number of key/value heads (grouped-query attention). It must divide --num-attention-heads.",
        minimum=1,
        maximum=MAX_SIZE,
        aliases=("num-key-value-heads",),
        checkpoint="shape",
        common="model size",
    )
    kv_channels: int = derived(
        "hidden size / attention heads", "Width of one attention head.", minimum=1, maximum=MAX_SIZE, checkpoint="shape"
    )
    seq_length: int = required(
        "Sequence length of the training samples; for T5, of the encoder.",
        unit="tokens",
        minimum=1,
        maximum=MAX_SIZE,
        aliases=("encoder-seq-length",),
        checkpoint="default",
        common="model size",
    )
    decoder_seq_length: int | None = derived(
        "needed by T5",
        "Sequence length of T5's decoder: the spans cut out of the encoder's text, with their sentinels.",
        unit="tokens",
        minimum=3,
        maximum=MAX_SIZE,
        checkpoint="default",
        only_if=(when("model.model_type", "t5"),),
    )
    max_position_embeddings: int = derived(
        "--seq-length, or --decoder-seq-length where that is longer",
        "Number of learned position embeddings.",
        unit="tokens",
        minimum=1,
        maximum=MAX_SIZE,
        checkpoint="shape",
        common="model size",
    )
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = option(
        "learned_absolute",
        "Kind of position embedding.",
        checkpoint="shape",
        common="model form",
    )
    rotary_base: float = option(
        10000.0,
        "Base of the rotary frequencies.",
        above=0,
        aliases=("rotary-position-embeddings-theta",),
        checkpoint="shape",
        only_if=(when("model.position_embedding_type", "rope"),),
    )
    rope_local_base_freq: float | None = derived(
        "--rotary-base",
        "Base of the rotary frequencies in layers with a window (--sliding-window), to which --rotary-scaling "
        "then does not apply (Gemma 3).",
        above=0,
        checkpoint="shape",
    )
    rotary_percent: float = option(
        1.0, "Share of each head's channels to rotate.", above=0, maximum=1, checkpoint="shape"
    )
    rotary_scaling: Literal["none", "linear", "llama3", "yarn"] = option(
        "none",
        "Scale the rotary wavelengths for sequences longer than in pretraining: all of them (linear), or only "
        "the long ones (llama3, yarn).",
        checkpoint="shape",
    )
    rotary_scaling_factor: float = option(
        8.0,
        "Factor of --rotary-scaling.",
        minimum=1,
        aliases=("rope-scaling-factor", "yarn-rotary-scaling-factor"),
        checkpoint="shape",
    )
    rotary_scaling_original_length: int = option(
        8192,
        "With --rotary-scaling llama3 or yarn: sequence length in pretraining.",
        unit="tokens",
        minimum=1,
        aliases=("yarn-original-max-position-embeddings",),
        checkpoint="shape",
    )
    rotary_scaling_low_turns: float = option(
        1.0,
        "With --rotary-scaling llama3 or yarn: wavelengths that turn fewer times in the original length are "
        "fully scaled.",
        above=0,
        aliases=("yarn-beta-slow",),
        checkpoint="shape",
    )
    rotary_scaling_high_turns: float = derived(
        "32 for yarn, else 4",
        "With --rotary-scaling llama3 or yarn: wavelengths that turn more often in the original length are not scaled.",
        above=0,
        aliases=("yarn-beta-fast",),
        checkpoint="shape",
    )
    rotary_scaling_attention_factor: float = derived(
        "1 + 0.1 ln(factor) for yarn, else 1",
        "With --rotary-scaling yarn: factor applied to the rotated queries, and to the keys.",
        above=0,
        checkpoint="shape",
    )
    yarn_correction_range_round_to_int: bool = option(
        True,
        "With --rotary-scaling yarn: do not round the bounds of the channel range over which scaling sets in.",
        flag="no-yarn-correction-range-round-to-int",
        off_switch=True,
        checkpoint="shape",
    )
    sliding_window: int | None = derived(
        "all earlier positions",
        "Sliding-window attention: number of positions that a token attends to, including its own.",
        unit="tokens",
        minimum=1,
        checkpoint="shape",
    )
    window_attn_skip_freq: list[int] = option(  # noqa: RUF009
        [],
        "Layers without the window of --sliding-window: every N-th one, or a 1 (window) or 0 (none) for each "
        "layer. By default all layers have the window.",
        minimum=0,
        maximum=MAX_LAYERS,
        checkpoint="shape",
    )
    untie_embeddings_and_output_weights: bool = option(
        False, "Use separate weights for the output layer.", checkpoint="shape", common="model form"
    )
    apply_embedding_scaling: bool = option(
        False,
        "Multiply token embeddings by the square root of --hidden-size, rounded to the parameters' data type (Gemma).",
        checkpoint="shape",
    )
    final_logit_softcapping: float | None = derived(
        "no bound",
        "Soft bound C on the output logits x: C tanh(x / C) (Gemma 2).",
        above=0,
        aliases=("output-logit-softcapping",),
        checkpoint="shape",
        only_if=(WORDS,),
    )
    bert_binary_head: bool = option(
        True,
        "BERT without the binary head, which predicts whether two sentences are in order: no sop loss and no "
        "token types.",
        flag="bert-no-binary-head",
        off_switch=True,
        checkpoint="shape",
        only_if=(when("model.model_type", "bert"),),
    )
    num_tokentypes: int = derived(
        "2 for BERT with its binary head, else 0",
        "Number of BERT's token types, each with an embedding: the first sentence has type 0, the second type 1. "
        "0: no token types, so both look alike.",
        minimum=0,
        maximum=MAX_SIZE,
        checkpoint="shape",
    )
    position_buckets: int = option(
        0,
        "DeBERTa: token distances beyond half of this share vectors, on a logarithmic scale; 0 for none.",
        minimum=0,
        maximum=MAX_SIZE,
        checkpoint="shape",
        only_if=(when("model.model_type", "deberta"),),
    )
    max_relative_positions: int | None = derived(
        "--max-position-embeddings for DeBERTa",
        "DeBERTa: distance beyond which all distances share one vector.",
        unit="tokens",
        minimum=1,
        maximum=MAX_SIZE,
        checkpoint="shape",
        only_if=(when("model.model_type", "deberta"),),
    )
    conv_kernel_size: int = option(
        0,
        "DeBERTa: width of a convolution in parallel with the first layer; 0 for none.",
        unit="tokens",
        minimum=0,
        maximum=255,
        checkpoint="shape",
        only_if=(when("model.model_type", "deberta"),),
    )
    task_head: TaskHead = option(  # noqa: RUF009
        "none",
        "Head that predicts one thing about a whole sample instead of its words: its class, a number, or which "
        "of several texts is right. Only tasks/main.py trains such models, and sets this itself.",
        checkpoint="shape",
    )
    task_classes: int = option(
        0,
        "Number of classes for --task-head classification, or of texts for --task-head choice; tasks/main.py sets it.",
        minimum=0,
        maximum=MAX_SIZE,
        checkpoint="shape",
    )
    fp32_residual_connection: bool = option(
        False,
        "Keep the residual stream in fp32 with --fp16 or --bf16; stages then exchange fp32.",
        checkpoint="default",
        only_if=(HALF_PRECISION,),
    )
    attention_dropout: float = option(0.1, "Dropout probability of the attention weights.", minimum=0, below=1)
    hidden_dropout: float = option(0.1, "Dropout probability of embeddings and residual branches.", minimum=0, below=1)
    init_method_std: float = option(
        0.02,
        "Standard deviation of the initial weights.",
        minimum=0,
        maximum=1e6,
        only_if=(unless("model.init_method_xavier_uniform"),),
    )
    init_method_xavier_uniform: bool = option(False, "Draw the initial weights from Xavier's uniform distribution.")
    make_vocab_size_divisible_by: int = option(
        128,
        "Pad the vocabulary to a multiple of this times the tensor-parallel size.",
        unit="entries",
        minimum=1,
        maximum=MAX_SIZE,
        checkpoint="default",
    )

    def residual_dtype(self, params_dtype: torch.dtype) -> torch.dtype:
        """Dtype of the residual stream, which pipeline stages exchange; may differ from the parameter dtype."""
        import torch

        return torch.promote_types(params_dtype, torch.float32) if self.fp32_residual_connection else params_dtype

    @property
    def causal(self) -> bool:
        """Whether attention is causal. Otherwise samples are padded and carry a padding mask."""
        return self.model_type == "gpt"

    @property
    def type_and_task(self) -> str:
        """Type of the model with its task, see ``describe_model_type``."""
        return describe_model_type(self.model_type, self.task_head, self.task_classes)

    @property
    def predicts_words(self) -> bool:
        """Whether the model predicts tokens, not properties of whole samples (as DeBERTa always does)."""
        return self.task_head == "none" and self.model_type != "deberta"

    @property
    def ties_embeddings(self) -> bool:
        """Whether the output projection shares the weight of the embedding."""
        return self.predicts_words and not self.untie_embeddings_and_output_weights

    @property
    def shares_distances(self) -> bool:
        """Whether all pipeline stages hold a copy of the relative-position embedding."""
        return self.model_type == "deberta"

    @property
    def relative_span(self) -> int:
        """Number of relative distances per direction with a separate embedding."""
        return self.position_buckets or self.max_relative_positions or 0

    @property
    def num_outputs(self) -> int:
        """Outputs per sequence of a model with a task head."""
        return self.task_classes if self.task_head == "classification" else 1

    @property
    def sequences_per_sample(self) -> int:
        """Sequences per label; they are adjacent in a micro-batch."""
        return self.task_classes if self.task_head == "choice" else 1

    @property
    def decoder_layers(self) -> range:
        """Layer numbers of the decoder of an encoder-decoder model, after those of the encoder; empty otherwise."""
        decoder = (self.decoder_num_layers or 0) if self.model_type == "t5" else 0
        return range(self.num_layers, self.num_layers + decoder) if decoder else range(0)

    @property
    def expert_layers(self) -> dict[int, int]:
        """Layer number -> number of experts, for the layers with experts."""
        return self.expert_layers_of(self.num_layers)

    def window_of(self, layer: int) -> int | None:
        """Attention window of a layer, including the token itself; None: all earlier tokens."""
        pattern = self.window_attn_skip_freq
        return self.sliding_window if not pattern or pattern[layer] else None

    @property
    def rotary_channels(self) -> int:
        """Rotated channels of each head."""
        return int(self.kv_channels * self.rotary_percent)

    @property
    def qkv_channels(self) -> int:
        """Channels of a token's queries, keys and values, over all heads."""
        return (self.num_attention_heads + 2 * self.num_query_groups) * self.kv_channels

    @property
    def attention_products(self) -> int:
        """Multiply-adds per token in the projections of self-attention; as many as their weights."""
        return self.hidden_size * (self.qkv_channels + self.num_attention_heads * self.kv_channels)

    @property
    def pair_products(self) -> int:
        """Multiply-adds per pair of tokens in self-attention."""
        return 2 * self.num_attention_heads * self.kv_channels

    def begins_decoder(self, layers: range) -> bool:
        """Whether the first decoder layer of an encoder-decoder model is among these."""
        return bool(self.decoder_layers) and self.decoder_layers.start in layers

    def labels_of(self, length: int) -> int:
        """Number of labels of a sample with this many (encoder) tokens."""
        return (self.decoder_seq_length or 0) if self.model_type == "t5" else length

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Names of the losses that add up to the training objective."""
        if not self.predicts_words:
            return (REGRESSION_LOSS if self.task_head == "regression" else CLASSIFICATION_LOSS,)
        return (LM_LOSS, SOP_LOSS) if self.model_type == "bert" and self.bert_binary_head else (LM_LOSS,)
