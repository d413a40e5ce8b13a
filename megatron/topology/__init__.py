"""Ranks, groups, devices, launch and teardown."""
