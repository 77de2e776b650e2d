"""The interpreter, where it is needed, is chosen before any test of this folder imports triton."""

from tests import triton_device

assert triton_device.DEVICE
