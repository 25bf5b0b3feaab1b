"""A driver and its workers: roles in processes of their own, called as one object."""
