"""Partition of the model over pipeline ranks; construction and initialization of each rank's chunks."""

from __future__ import annotations

import math

from megatron.config.model import ModelConfig
from megatron.config.vocabulary import check_vocabulary
from megatron.distributed.layout import Layout
from megatron.models.bert import BertStage
from megatron.models.classification import ClassifierStage
from megatron.models.deberta import DebertaStage
from megatron.models.gpt import GPTStage
from megatron.models.rank_context import RankContext
from megatron.models.stage import Stage, StagePart
from megatron.models.t5 import T5Stage
from megatron.parallel.tensor.embedding import VocabShard
from megatron.parallel.tensor.random import fill_keyed, normal, uniform
from megatron.parallel.tensor.shards import collect_specs


def stage_layers(config: ModelConfig, layout: Layout, stage: int) -> range:
    """Layers of a virtual stage; encoder and decoder layers are divided evenly over encoder and decoder stages."""
    stages, layers = layout.num_virtual_stages, range(config.num_layers + len(config.decoder_layers))
    if layout.follows_encoder(stage):
        stages, layers, stage = stages - layout.decoder, config.decoder_layers, stage - layout.decoder
    elif layout.decoder:
        stages, layers = layout.decoder, range(config.num_layers)
    each = len(layers) // stages
    return layers[stage * each : (stage + 1) * each]


def boundary_lengths(config: ModelConfig, layout: Layout, length: int) -> list[int]:
    """Sequence length of the activations at each boundary between virtual stages, in order.

    Args:
        config: the model.
        layout: the mesh.
        length: tokens of the sample; in encoder-decoder models, of the encoder.
    """
    joint_length = length + (config.decoder_seq_length or 0)
    stages = range(layout.num_virtual_stages - 1)
    return [joint_length if layout.follows_encoder(stage) else length for stage in stages]


def padded_vocab_size(vocab_size: int, multiple: int, tp: int) -> int:
    """Vocabulary size rounded up to a multiple of ``multiple`` x ``tp``."""
    step = multiple * tp
    return -(-vocab_size // step) * step


def build_stages(rank: RankContext, layout: Layout, pp: int, vocab_size: int, seed: int | None) -> list[Stage]:
    """Build this pipeline rank's chunks in order; initialize weights unless ``seed`` is None.

    Raises:
        UserError: when a rank would hold no rows of the vocabulary.
    """
    config = rank.config
    check_vocabulary(vocab_size, config.make_vocab_size_divisible_by, rank.tensor.size)
    padded_size = padded_vocab_size(vocab_size, config.make_vocab_size_divisible_by, rank.tensor.size)
    shard = VocabShard(vocab_size, padded_size, rank.tensor)
    stages: list[Stage] = []
    for chunk in range(layout.chunks):
        number = layout.virtual_stage(pp, chunk)
        last = number == layout.num_virtual_stages - 1
        shares_words = config.ties_embeddings and last and any(stage.stage_part.first for stage in stages)
        part = StagePart(stage_layers(config, layout, number), number == 0, last, shares_words)
        stage = make_stage(rank, part, shard)
        if shares_words:
            stage.share_words(stages[0])
        if seed is not None:
            initialize(stage, config, seed)
        stages.append(stage)
    return stages


def make_stage(rank: RankContext, stage_part: StagePart, shard: VocabShard) -> Stage:
    """Build a stage of the configured type of model, with uninitialized weights; see ``Stage``."""
    types: dict[str, type[Stage]] = {"gpt": GPTStage, "bert": BertStage, "t5": T5Stage, "deberta": DebertaStage}
    is_classifier = not rank.config.predicts_words and rank.config.model_type != "deberta"
    stage_type = ClassifierStage if is_classifier else types[rank.config.model_type]
    return stage_type(rank, stage_part, shard)


def initialize(stage: Stage, config: ModelConfig, seed: int) -> None:
    """Initialize weights as Megatron does: normal(0, std), with layer outputs scaled by 1 / sqrt(2 num_layers).

    Norm weights stay 1 and biases 0, as constructed.
    """
    specs = collect_specs(stage)
    for name, param in stage.named_parameters():
        logical_name, spec = specs[name]
        if not logical_name.endswith(".weight") or param.dim() < 2:
            continue
        if config.init_method_xavier_uniform and "embedding" not in logical_name and "output_layer" not in logical_name:
            fan_out, fan_in = spec.logical_shape[-2:]
            draw = uniform(math.sqrt(6.0 / (fan_in + fan_out)))
        else:
            scaled = logical_name.endswith(("attention.dense.weight", "dense_4h_to_h.weight"))
            draw = normal(config.init_method_std / (math.sqrt(2.0 * config.num_layers) if scaled else 1.0))
        fill_keyed(param, spec, logical_name, seed, draw)
