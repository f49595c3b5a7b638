"""Python imports this at its start where this folder is on PYTHONPATH; see ``aligned_e2e.ready``."""

from aligned_e2e.ready import assume_ready

assume_ready()
