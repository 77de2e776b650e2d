"""Quire beside its peers on one machine: `make bench-peers`, or `python -m benchmarks.peers --help`."""
