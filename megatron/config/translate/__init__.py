"""Translation of flags of other systems, and of our old flags, into our flags.

Independent flags are translated before their arguments are parsed (`OldFlag`), interdependent flags before sections are
built (`Rule`, `Dialect`). Later code sees only our flags.
"""

from functools import cache

from megatron.config.translate.aqsgd import AQSGD
from megatron.config.translate.deepspeed import DEEPSPEED
from megatron.config.translate.known import RETIRED_FIELDS, read_known_flags
from megatron.config.translate.legacy import LEGACY
from megatron.config.translate.megatron_lm import MEGATRON_LM
from megatron.config.translate.rules import Translator
from megatron.config.translate.shortcuts import SHORTCUTS


@cache
def build_translator() -> Translator:
    """Build the translator of the flags of other systems for training runs."""
    return Translator(
        flags=(*SHORTCUTS, *read_known_flags()),
        dialects=(DEEPSPEED, AQSGD, LEGACY, MEGATRON_LM),
        retired_fields=RETIRED_FIELDS,
    )
