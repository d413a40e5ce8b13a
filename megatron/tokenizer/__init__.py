"""Text to token ids and back. Start with ``megatron.tokenizer.build.build_tokenizer``."""
