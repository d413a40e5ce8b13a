"""Tokenizers. Start with ``megatron.tokenizer.build.build_tokenizer``."""
