"""Quire serves large language models as four gRPC services."""

__version__ = "0.1.0"
