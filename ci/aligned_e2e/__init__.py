"""The full aligned stack, composed: a small DeepSeek-V4, a rollout engine, an actor, a reload, and their comparison."""
