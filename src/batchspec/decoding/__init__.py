"""One round each: draft, verify, commit, roll back."""
