"""Labelled samples of fine-tuning tasks."""
