"""Ranks, process groups, launch, failure detection, and the accounting of traffic."""
