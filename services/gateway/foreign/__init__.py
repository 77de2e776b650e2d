"""Protocols of others on the gRPC port: each translates to our own requests and back."""
