"""From logits to tokens: processors and verification. Pure tensors; needs no model and no drafter."""
