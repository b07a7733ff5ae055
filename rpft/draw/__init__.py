"""Pictures and pages that need no other file: timelines, bars, tables. Knows nothing of training."""
