"""How well a model computes: perplexity of a text, agreement with a reference; `quire eval`."""
