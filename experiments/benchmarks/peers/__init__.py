"""Peers measured beside this project: `python -m experiments.benchmarks.peers`."""
