"""Small drafters for targets that have no small sibling: made from the target alone."""
