"""The communication points between the engines and the compressors."""
