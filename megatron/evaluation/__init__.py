"""Evaluation of trained models: zero-shot tasks, lm-evaluation-harness, losses of a run's checkpoints."""
