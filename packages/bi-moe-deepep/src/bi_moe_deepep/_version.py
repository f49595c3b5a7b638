"""The one place where this version is written."""

__version__ = "0.1.0"
