"""Measurements: what they ran on, what they ran, and what came out."""
