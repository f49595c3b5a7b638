"""Runtime shared by the four packages: switch, errors, native loader, hooks, anchors, attestation, probes, doctor.

Importing any module here imports neither torch nor vLLM, except ``checks`` and ``library``, which work on tensors.
"""
