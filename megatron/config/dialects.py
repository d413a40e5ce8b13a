"""The systems whose flags are understood."""

from __future__ import annotations

from megatron.config import aqsgd, deepspeed, legacy
from megatron.config.aqsgd import AqsgdConfig
from megatron.config.deepspeed import DeepSpeedConfig
from megatron.config.legacy import LegacyConfig
from megatron.config.translation import Dialect

DIALECTS = (
    Dialect(section=deepspeed.SECTION, config=DeepSpeedConfig, translate=deepspeed.translate),
    Dialect(section=aqsgd.SECTION, config=AqsgdConfig, translate=aqsgd.translate),
    Dialect(section=legacy.SECTION, config=LegacyConfig, translate=legacy.translate),
)


def dialect_sections() -> dict[str, type]:
    """Section name -> dataclass."""
    return {dialect.section: dialect.config for dialect in DIALECTS}
