"""Makes quantized checkpoints, layer by layer. Uses torch; serving what it writes does not."""
