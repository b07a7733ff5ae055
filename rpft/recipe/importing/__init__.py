"""Recipes from files of axolotl and LLaMA-Factory: their keys, their rows, and what both hand to one trainer."""
