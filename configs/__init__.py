"""Recipes: each module's `get_config()` returns a complete config."""
