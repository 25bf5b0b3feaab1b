"""Code that runs beside untrusted programs: the standard library only, and nothing else of this
project."""
