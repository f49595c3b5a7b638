"""Stands in for vLLM: has no plug-ins."""


def load_general_plugins() -> None:
    """There are none."""
