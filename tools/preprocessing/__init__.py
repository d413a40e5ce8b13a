"""The parts of tools/preprocess_data.py: reading lines, encoding them, running that in parallel."""
