"""Checkpoints of tiny models, made once a session; graphs made once a module for some; one thread a kernel."""

from support.fixtures import checkpoint, choices_seen_once, functions_made_once, one_thread_a_kernel

__all__ = ["checkpoint", "choices_seen_once", "functions_made_once", "one_thread_a_kernel"]
