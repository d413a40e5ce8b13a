"""Translation of flags of other systems, and of our old ones, into our flags.

Each flag by itself is translated before its words are read as values (`OldFlag`), and what flags mean together before
sections are built (`Rule`, `Dialect`): nothing behind knows of other flags than ours.
"""

from megatron.config.translate.aqsgd import AQSGD
from megatron.config.translate.deepspeed import DEEPSPEED
from megatron.config.translate.known import KNOWN_FLAGS
from megatron.config.translate.legacy import LEGACY
from megatron.config.translate.megatron_lm import MEGATRON_LM
from megatron.config.translate.rules import Translator
from megatron.config.translate.shortcuts import SHORTCUTS

TRANSLATOR = Translator(flags=(*SHORTCUTS, *KNOWN_FLAGS), dialects=(DEEPSPEED, AQSGD, LEGACY, MEGATRON_LM))
"""Flags of other systems that the command line of a training run accepts."""
