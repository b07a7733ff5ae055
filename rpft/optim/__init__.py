"""The optimizer on the host: AdamW over flat layers, clipping, learning-rate schedules."""
