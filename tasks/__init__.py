"""Zero-shot evaluation of trained models."""
