"""The configuration of a run: typed sections, flags, YAML files, checks."""
