"""Packed matrices times activations: layouts in format.h, the truth in reference.py."""
