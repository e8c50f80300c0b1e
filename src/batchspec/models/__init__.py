"""The only home of transformers' modelling API: loading, the slot cache, packed attention, the forward pass."""
