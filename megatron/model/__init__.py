"""The GPT model, readable as a single-device model."""
