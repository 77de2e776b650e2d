"""vllm.grpc.engine.VllmEngine, as SMG speaks it."""
