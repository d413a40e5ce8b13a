"""GPT, BERT, T5 and DeBERTa, readable as single-device models."""
