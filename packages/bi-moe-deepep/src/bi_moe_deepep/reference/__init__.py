"""Exact references: the specification of every op, in pure torch, shipped with the package."""
