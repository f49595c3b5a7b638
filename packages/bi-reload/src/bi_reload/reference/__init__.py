"""The bit-level specification of every op, in plain torch."""
