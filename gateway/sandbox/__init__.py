"""Untrusted programs, run where they can do no harm: `choice.make_sandbox`."""
