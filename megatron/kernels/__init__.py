"""Native operations under the hot paths."""
