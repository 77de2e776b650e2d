"""Makes a smaller model of the same vocabulary: fewer layers, narrower MLPs, fewer heads."""
