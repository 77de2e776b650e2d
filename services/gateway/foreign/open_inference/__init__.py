"""inference.GRPCInferenceService, the Open Inference Protocol as Triton's clients speak it."""
