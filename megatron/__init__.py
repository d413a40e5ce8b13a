"""Megatron-CC: GPT pretraining with pluggable compression at every communication point."""
