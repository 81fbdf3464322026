"""Terms to loss to update. It does not know who made the terms."""
