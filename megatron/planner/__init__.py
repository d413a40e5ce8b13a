"""Cost model and search for layouts and compressors on a cluster."""
