"""Every section of a recipe, a module each: its keys, their types, defaults, bounds and meanings."""
