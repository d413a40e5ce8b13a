"""Predicts what a layout and a compression cost on a cluster."""
