"""Whole runs in one process on virtual time, deterministic from a seed."""
