"""Rotary position embedding."""

from kernels.rope.reference import rotate_

__all__ = ["rotate_"]
