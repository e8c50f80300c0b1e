"""Proves or disproves, on any engine, that its outputs are the target model's."""
