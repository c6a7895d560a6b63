"""Recipe of a small policy for LIBERO."""
