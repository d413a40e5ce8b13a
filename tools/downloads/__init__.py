"""Downloads of what training needs: vocabularies, checkpoints, texts. dataset/ has a script for each."""
