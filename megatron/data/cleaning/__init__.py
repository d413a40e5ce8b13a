"""Building blocks for cleaning web text; the commands are in tools/openwebtext."""
