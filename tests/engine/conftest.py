"""Checkpoints of tiny models, made once a session; one thread a kernel."""

from support.fixtures import checkpoint, one_thread_a_kernel

__all__ = ["checkpoint", "one_thread_a_kernel"]
