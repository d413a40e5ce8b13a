"""Preprocessing: encodes lines of text in parallel into token files, and trains vocabularies."""
