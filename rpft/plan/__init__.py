"""Which layers form which stages, and what that takes."""
