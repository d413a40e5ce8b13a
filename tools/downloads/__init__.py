"""Downloads of vocabularies, checkpoints and texts; dataset/ has a script for each."""
