"""The engine: a controller that dispatches slots to stateless workers, over streams ordered by events."""
