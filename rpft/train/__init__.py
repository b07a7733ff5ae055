"""One training loop for every kind of run: prepare, step, evaluate, save, resume."""
