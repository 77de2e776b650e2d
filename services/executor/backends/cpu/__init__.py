"""The cpu backend: packed weights and a native program over them; imports neither torch nor transformers."""
