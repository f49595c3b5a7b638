"""Stands in for vLLM; the harness replaces a name here."""
