"""Layer architecture: norms, activation, biases and attention scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.base.option import Condition, derived, option
from megatron.base.parse_numbers import MAX_SIZE

_GELU_WITH_BIAS = Condition(
    lambda run, _: (
        run.model.add_bias_linear and not (run.model.gated or run.model.squared_relu or run.model.openai_gelu)
    ),
    "with another activation or --disable-bias-linear",
)
_GELU_IN_EXACT_FORM = Condition(
    lambda run, _: not (run.model.bias_gelu_fusion and run.model.add_bias_linear),
    "GELU has its tanh form anyway, except with --no-bias-gelu-fusion or --disable-bias-linear",
)


@dataclass(frozen=True, kw_only=True)
class LayerFormConfig:
    """Layer-architecture fields of the model; ``ModelConfig`` inherits them."""

    normalization: Literal["LayerNorm", "RMSNorm"] = option(
        "LayerNorm", "Normalization layer.", checkpoint="shape", common="model form"
    )
    apply_layernorm_1p: bool = option(
        False,
        "Normalization layers multiply by 1 + weight, and their weights start at 0 (Gemma).",
        checkpoint="shape",
    )
    sandwich_norm: bool = option(
        False,
        "Also normalize the outputs of attention and the MLP before they are added to the residual stream: four "
        "norms per layer (Gemma 2).",
        checkpoint="shape",
    )
    norm_epsilon: float = option(
        1e-5,
        "Epsilon of the normalization layers, added to the variance.",
        above=0,
        aliases=("layernorm-epsilon",),
        checkpoint="shape",
    )
    swiglu: bool = option(False, "Gated MLP: SiLU(gate) * up instead of GELU.", checkpoint="shape", common="model form")
    geglu: bool = option(False, "Gated MLP: GELU(gate) * up, with GELU in its tanh form (Gemma).", checkpoint="shape")
    openai_gelu: bool = option(False, "GELU in its tanh form.", checkpoint="shape", only_if=(_GELU_IN_EXACT_FORM,))
    squared_relu: bool = option(False, "Squared ReLU instead of GELU.", checkpoint="shape")
    bias_gelu_fusion: bool = option(
        True,
        "GELU in its exact (erf) form. Without this flag GELU has its tanh form, as in Megatron, if the MLP has "
        "a bias.",
        flag="no-bias-gelu-fusion",
        off_switch=True,
        checkpoint="shape",
        only_if=(_GELU_WITH_BIAS,),
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
        "Biases in the query, key and value projection, even with --disable-bias-linear.",
        checkpoint="shape",
    )
    qk_layernorm: bool = option(
        False,
        "Normalize the queries and keys of each head (--normalization) before the rotary embedding (Qwen3), "
        "which bounds the attention logits.",
        checkpoint="shape",
    )
    query_pre_attn_scalar: int | None = derived(
        "--kv-channels",
        "Divide attention scores by the square root of this.",
        minimum=1,
        maximum=MAX_SIZE,
        checkpoint="shape",
    )
    attn_logit_softcapping: float | None = derived(
        "no bound",
        "Soft bound C on the attention scores x: C tanh(x / C) (Gemma 2). Attention is then not fused: it stores "
        "the scores of all pairs of tokens.",
        above=0,
        checkpoint="shape",
    )
    parallel_residual: bool = option(
        False,
        "Run the MLP in parallel with attention, on the layer's input, instead of after attention.",
        checkpoint="shape",
    )

    @property
    def gated(self) -> bool:
        """Whether the MLP is gated."""
        return self.swiglu or self.geglu

    @property
    def activation(self) -> str:
        """Activation of the MLP: "swiglu", "geglu", "squared_relu", "gelu_tanh" or "gelu" (exact).

        Megatron's fused bias-GELU kernel computes the tanh form; it is not used without biases.
        """
        if self.swiglu:
            return "swiglu"
        if self.geglu:
            return "geglu"
        if self.squared_relu:
            return "squared_relu"
        if self.openai_gelu or (self.bias_gelu_fusion and self.add_bias_linear):
            return "gelu_tanh"
        return "gelu"
