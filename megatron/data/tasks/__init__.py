"""Labeled samples of fine-tuning tasks."""
