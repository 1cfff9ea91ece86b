"""Per-example clipping: recording, gradients of layers, fallbacks, clip functions."""
